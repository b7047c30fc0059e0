"""The guardian's workers, with an SDK in them that prints, or that does not let its process end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lowtide import machine
from lowtide.lifecycle import guardian_workers
from lowtide.lifecycle.guardian_link import peer_pid
from lowtide.lifecycle.guardian_socket import Links
from lowtide.lifecycle.guardian_workers import Credentials, Start, Workers
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import Lease, LeaseState, Outcome, new_lease_id
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers import registry
from lowtide.providers.base import SandboxSpec
from lowtide.testing import FaultyService
from lowtide.testing.faulty import FaultyProvider

NOISY = """
import dataclasses, os, threading, time
from lowtide.testing.faulty import FaultyProvider

print("an SDK is proud of its version")

class Noisy(FaultyProvider):
    name = "noisy"
    traits = dataclasses.replace(FaultyProvider.traits, light=False)

    async def destroy(self, sandbox_id, *, grace_seconds=0.0):
        print("deleting", sandbox_id, flush=True)
        os.write(1, b"and a library in C, too\\n")
        if "LOWTIDE_NOISY_STAYS" in os.environ:
            threading.Thread(target=time.sleep, args=(1000,)).start()
        return await super().destroy(sandbox_id, grace_seconds=grace_seconds)
"""


@pytest.fixture
def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's provider, which is not light: it runs in a worker."""
    site = tmp_path / "site"
    (site / "noisy-1.dist-info").mkdir(parents=True)
    (site / "noisy.py").write_text(NOISY)
    (site / "noisy-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1\n")
    (site / "noisy-1.dist-info" / "entry_points.txt").write_text("[lowtide.providers]\nnoisy = noisy:Noisy\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(guardian_workers, "ANSWER_SECONDS", 20.0)


async def _made(home: Path, service: FaultyService) -> Lease:
    ledger = SqliteLedger(home / "ledger.db")
    provider = FaultyProvider(service.directory)
    lease = Lease(
        lease_id=new_lease_id(),
        provider="noisy",
        account=provider.account,
        owner=Owner.current(),
        ledger_id=ledger.ledger_id,
        state=LeaseState.LIVE,
    )
    info = await provider.create(SandboxSpec(labels=lease.labels))
    await ledger.intend(lease)
    await ledger.note(lease.lease_id, "", sandbox_id=info.sandbox_id)
    ledger.close()
    return lease


@contextlib.asynccontextmanager
async def listening(home: Path) -> AsyncIterator[Workers]:
    """The workers of a guardian that does nothing else: they come to its socket."""

    async def went(owner: Owner) -> None: ...

    workers = Workers(home)
    links = Links(
        home,
        10,
        learn=lambda credentials, start: None,
        came=lambda owner: None,
        worker=workers.serve,
        went=went,
        status=dict,
    )
    await links.open()
    try:
        yield workers
    finally:
        links.close()


async def test_an_sdk_that_prints_is_not_taken_for_an_answer(tmp_path: Path, noisy: None) -> None:
    with FaultyService(tmp_path / "service") as service:
        lease = await _made(tmp_path, service)
        async with listening(tmp_path) as workers:
            workers.learn(Credentials("noisy", lease.account, {"LOWTIDE_FAULTY_DIR": str(service.directory)}))
            outcome, _ = await workers.end(lease, Decision(Fate.DESTROY, "its owner is dead"))
            assert outcome is Outcome.DESTROYED
            assert not service.sandboxes()
            await workers.aclose()


async def test_a_worker_that_does_not_end_keeps_no_guardian(
    tmp_path: Path, noisy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian_workers, "LEAVE_SECONDS", 0.5)
    environ = {"LOWTIDE_NOISY_STAYS": "1"}
    with FaultyService(tmp_path / "service") as service:
        lease = await _made(tmp_path, service)
        async with listening(tmp_path) as workers:
            environ["LOWTIDE_FAULTY_DIR"] = str(service.directory)
            workers.learn(Credentials("noisy", lease.account, environ))
            await workers.end(lease, Decision(Fate.DESTROY, "its owner is dead"))
            ((worker,),) = workers._workers.values()
            pid = peer_pid(worker._writer.get_extra_info("socket"))
            async with asyncio.timeout(20):
                await workers.aclose()
            while machine.running_process(pid) is not None:  # killed, and on its way out
                await asyncio.sleep(0.02)


async def test_a_worker_that_hangs_is_replaced(
    tmp_path: Path, noisy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyService(tmp_path / "service") as service:
        lease = await _made(tmp_path, service)
        async with listening(tmp_path) as workers:
            workers.learn(Credentials("noisy", lease.account, {"LOWTIDE_FAULTY_DIR": str(service.directory)}))
            (hanging,) = await workers._obtain(("noisy", lease.account))
            assert await hanging.answers()
            pid = peer_pid(hanging._writer.get_extra_info("socket"))
            os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr(guardian_workers, "ANSWER_SECONDS", 0.5)
            monkeypatch.setattr(guardian_workers, "PING_SECONDS", 0.5)
            outcome, why = await workers.end(lease, Decision(Fate.DESTROY, "its owner is dead"))
            assert (outcome, why) == (Outcome.FAILED, "the worker did not answer")
            monkeypatch.setattr(guardian_workers, "ANSWER_SECONDS", 20.0)
            outcome, _ = await workers.end(lease, Decision(Fate.DESTROY, "its owner is dead"))
            assert outcome is Outcome.DESTROYED
            while machine.running_process(pid) is not None:  # killed, and on its way out
                await asyncio.sleep(0.02)
            await workers.aclose()


async def test_an_account_that_is_refused_again_and_again_has_one_worker(tmp_path: Path, noisy: None) -> None:
    key = ("noisy", "nobody")
    async with listening(tmp_path) as workers:
        workers.learn(Credentials(*key, {"LOWTIDE_FAULTY_DIR": str(tmp_path / "service")}))
        for _ in range(3):
            await workers._start(key, None)
            async with asyncio.timeout(20):
                while workers._serving(key) or len(workers._workers[key]) != 1:
                    await asyncio.sleep(0.02)
        await workers.aclose()


async def test_an_owner_is_told_that_its_worker_cannot_serve(tmp_path: Path, noisy: None) -> None:
    told: list[dict[str, Any]] = []
    async with listening(tmp_path) as workers:
        owner = Start(tell=told.append, network=machine.network_namespace())
        workers.learn(
            Credentials("noisy", "nobody", {"LOWTIDE_FAULTY_DIR": str(tmp_path / "service")}), owner
        )
        assert told == [{"worker": {"name": "noisy", "account": "nobody"}}]
        await workers._start(("noisy", "nobody"), None)  # as the owner would
        async with asyncio.timeout(20):
            while len(told) < 2:
                await asyncio.sleep(0.02)
        assert "another noisy account" in told[1]["problem"]
        await workers.aclose()


@pytest.mark.parametrize(
    ("name", "own", "foreign"),
    [
        ("modal", {"MODAL_TOKEN_ID": "i", "MODAL_TOKEN_SECRET": "s"}, {"MODAL_ENVIRONMENT": "dev"}),
        ("runloop", {"RUNLOOP_API_KEY": "k"}, {"RUNLOOP_BASE_URL": "http://127.0.0.1:1"}),
        ("runloop", {"RUNLOOP_API_KEY": "k"}, {"RUNLOOP_CUSTOM_HEADERS": "x: y"}),
        ("coreweave", {"CWSANDBOX_API_KEY": "k"}, {"grpc_proxy": "http://127.0.0.1:1"}),
    ],
)
def test_what_an_owner_has_not_set_is_not_taken_from_whoever_started_the_guardian(
    name: str,
    own: dict[str, str],
    foreign: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without this the lease of the one is looked for in the account of the other, or by nobody.
    provider = registry.provider_class(name).connect(own)
    foreign = {**foreign, "HTTPS_PROXY": "http://127.0.0.1:9"}
    for variable, value in foreign.items():
        monkeypatch.setenv(variable, value)
    workers = Workers(tmp_path)
    workers.learn(Credentials(name, provider.account, provider.credentials()))
    environ = workers._environ((name, provider.account))
    assert guardian_workers.connect(name, provider.account, environ).account == provider.account
    assert not foreign.items() & environ.items()


def test_nor_is_the_engine_or_the_cluster_another_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = tmp_path / "config"
    named = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c"}}
    cluster.write_text(json.dumps({"clusters": [named], "contexts": [context], "current-context": "x"}))
    foreign = {"DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/nowhere", "HTTPS_PROXY": "http://127.0.0.1:9"}
    own = {"docker": {"DOCKER_HOST": "tcp://127.0.0.1:1"}, "kubernetes": {"KUBECONFIG": str(cluster)}}
    for variable, value in foreign.items():
        monkeypatch.setenv(variable, value)
    workers = Workers(tmp_path)
    for name in own:
        provider = registry.provider_class(name).connect(own[name])
        workers.learn(Credentials(name, "account", provider.credentials()))
    assert not foreign.keys() & workers._environ(("kubernetes", "account")).keys() - {*list(foreign)[:2]}
    assert not foreign.keys() & workers._environ(("docker", "account")).keys() - {"HTTPS_PROXY"}
