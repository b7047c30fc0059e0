"""CoreWeave on a bad day: each fault the emulator has, through the SDK's stubs, and nothing left after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.coreweave_emulator import needs_emulator, serving

from lowtide import Sandbox
from lowtide.engine import engine
from lowtide.errors import (
    LowtideError,
    RateLimitError,
    RequestTimeoutError,
    SandboxError,
    SandboxFailedError,
    SandboxGone,
    SandboxUnavailableError,
)
from lowtide.lifecycle.lease import LeaseState, Outcome, new_lease_id
from lowtide.lifecycle.leases import lifecycle
from lowtide.lifecycle.recover import recovery_spec
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.providers.coreweave import CoreWeaveProvider

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def serving_emulator() -> Iterator[Any]:
    yield from serving()


@pytest.fixture
def emulator(serving_emulator: Any) -> Iterator[Any]:
    """Nothing exists before, nothing after, and nothing is under way."""
    assert serving_emulator.state()["sandboxes"]["coreweave"] == []
    yield serving_emulator
    serving_emulator.faults.clear()
    deadline = time.monotonic() + 90
    while held := lifecycle().held:
        assert time.monotonic() < deadline, f"not settled: {held}"
        time.sleep(0.05)
    while left := serving_emulator.state()["sandboxes"]["coreweave"]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


@pytest.fixture
def provider(emulator: Any) -> Iterator[CoreWeaveProvider]:
    connected = CoreWeaveProvider.connect(os.environ)
    yield connected
    engine().run(connected.aclose(), SECONDS)


def spec() -> SandboxSpec:
    labels = Labels(lease_id=new_lease_id(), ledger_id="0123456789abcdef", owner="owner")
    return SandboxSpec(labels=labels, lifetime_seconds=300.0)


def existing(emulator: Any) -> list[str]:
    return [one["sandbox_id"] for one in emulator.state()["sandboxes"]["coreweave"]]


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped"])
def test_an_answer_lost_after_the_commit_makes_exactly_one(emulator: Any, fault: str) -> None:
    emulator.faults.add(fault)
    with Sandbox.run(provider="coreweave") as box:
        assert box.exec(["echo", "here"]).result(SECONDS).stdout == "here\n"
        assert existing(emulator) == [box.sandbox_id]


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped", "create-fails"])
def test_every_answer_lost_leaves_nothing(emulator: Any, fault: str) -> None:
    emulator.faults.add(fault, count=None)
    with contextlib.suppress(SandboxUnavailableError, RequestTimeoutError):
        Sandbox.run(provider="coreweave").stop().result(SECONDS)
    assert emulator.calls("create-sandbox")


def test_a_replay_returns_what_was_made(emulator: Any, provider: CoreWeaveProvider) -> None:
    """Whoever replays knows no more than the lease: the service says that the key is taken, the tag by what."""
    asked = replace(spec(), environment={"SECRET": "only the creator knows"})

    async def life() -> None:
        made = await provider.create(asked)
        found = await provider.replay(replace(asked, environment={}))
        assert found is not None
        assert found.sandbox_id == made.sandbox_id
        assert await provider.destroy(found.sandbox_id)
        again = await provider.replay(replace(asked, environment={}))
        assert again is not None
        assert (again.sandbox_id, again.state.terminal) == (made.sandbox_id, True)

    engine().run(life(), SECONDS)
    assert existing(emulator) == []


def test_a_replay_takes_the_place_of_a_request_that_comes_later(
    emulator: Any, provider: CoreWeaveProvider
) -> None:
    asked = spec()

    async def life() -> None:
        instead = await provider.replay(asked)
        assert instead is not None
        await provider.destroy(instead.sandbox_id)
        with pytest.raises(SandboxError):
            await provider.create(asked)

    engine().run(life(), SECONDS)
    assert existing(emulator) == []


def test_killed_while_the_service_still_makes_it(emulator: Any, tmp_path: Path) -> None:
    """The guardian does not wait a create window to see what comes: it takes the request's key."""
    slow = emulator.faults.add("create-slow", seconds=6.0)
    home = tmp_path / "home"
    owner = subprocess.Popen(
        [sys.executable, "-c", "from lowtide import Sandbox; Sandbox.run(provider='coreweave')"],
        env={**os.environ, "LOWTIDE_HOME": str(home)},
    )
    while not emulator.faults.hits(slow):
        assert owner.poll() is None
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    killed = time.monotonic()
    (row,) = engine().run(until_settled(home / "ledger.db"), SECONDS)
    assert row.sandbox_id is not None  # the one that took its place
    assert time.monotonic() - killed < CoreWeaveProvider.traits.create_window_seconds / 2
    time.sleep(max(0.0, 6.5 - (time.monotonic() - killed)))  # the request is over by now
    assert existing(emulator) == []
    provider = CoreWeaveProvider.connect(os.environ)
    found = engine().run(provider.find(recovery_spec(provider, row)), SECONDS)
    assert found is None


async def until_settled(path: Path) -> list[Any]:
    ledger = SqliteLedger(path)
    while True:
        rows = await ledger.leases(states=frozenset(LeaseState))
        if rows and all(row.state is LeaseState.GONE for row in rows):
            return rows
        await asyncio.sleep(0.05)


def test_a_sandbox_that_cannot_start_says_why_and_leaves_nothing(emulator: Any) -> None:
    emulator.faults.add("create-error-state")
    box = Sandbox.run(provider="coreweave")
    with pytest.raises(SandboxFailedError, match="cannot be pulled"):
        box.exec(["true"]).result(SECONDS)
    box.stop().result(SECONDS)


def test_a_slow_start_is_waited_for(emulator: Any) -> None:
    emulator.faults.add("start-slow", seconds=1.5)
    with Sandbox.run(provider="coreweave") as box:
        assert box.exec(["echo", "up"]).result(SECONDS).stdout == "up\n"


@pytest.mark.parametrize("fault", ["kill-fails", "kill-ignored"])
def test_an_end_that_fails_once_is_asked_for_again(emulator: Any, fault: str) -> None:
    box = Sandbox.run(provider="coreweave")
    emulator.faults.add(fault)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED
    assert existing(emulator) == []


def test_a_stop_that_hangs_ends_at_its_deadline_and_is_not_forgotten(
    emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_END_SECONDS", "2")
    box = Sandbox.run(provider="coreweave")
    emulator.faults.add("kill-hangs", seconds=6.0)
    with contextlib.suppress(LowtideError):
        report = box.stop().result(SECONDS)
        assert report.outcome is Outcome.FAILED
    assert existing(emulator) == [box.sandbox_id]
    monkeypatch.delenv("LOWTIDE_END_SECONDS")
    assert box.stop().result(SECONDS).outcome in (Outcome.DESTROYED, Outcome.ALREADY_GONE)


def test_a_dropped_connection_loses_no_output(emulator: Any) -> None:
    with Sandbox.run(provider="coreweave") as box:
        box.exec(["true"]).result(SECONDS)
        emulator.faults.add("exec-dropped", seconds=0.3, count=3)
        engine().run(_reconnect(box), SECONDS)
        script = "i=0; while [ $i -lt 200 ]; do echo $i; i=$((i+1)); sleep 0.01; done"
        lines = box.exec(["sh", "-c", script]).result(SECONDS).stdout.splitlines()
        assert lines == [str(number) for number in range(200)]


async def _reconnect(box: Sandbox) -> None:
    """The faults meet the next stream that is opened: let go of the one that is open."""
    from lowtide.providers import registry

    provider = registry.provider("coreweave")
    assert isinstance(provider, CoreWeaveProvider)
    client = await provider.clients.get(str(box.sandbox_id))
    client._link._drop()


def test_gone_in_the_middle_of_a_command(emulator: Any) -> None:
    box = Sandbox.run(provider="coreweave")
    emulator.faults.add("gone-mid-command", seconds=0.3)
    with pytest.raises(SandboxGone):
        box.exec(["sleep", "1000"]).result(SECONDS)
    assert box.stop().result(SECONDS).outcome in (Outcome.ALREADY_GONE, Outcome.DESTROYED)


def test_a_rate_limit_is_kept_to(emulator: Any, provider: CoreWeaveProvider) -> None:
    emulator.faults.add("rate-limit", seconds=0.4)
    with pytest.raises(RateLimitError) as caught:
        engine().run(provider.get("some"), SECONDS)
    assert caught.value.retry_after_seconds == 0.4
    box = Sandbox.run(provider="coreweave")
    emulator.faults.add("rate-limit", seconds=0.2, count=2)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED


def test_a_service_that_is_away_for_a_moment(emulator: Any) -> None:
    box = Sandbox.run(provider="coreweave")
    emulator.faults.add("unavailable", count=3)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED
