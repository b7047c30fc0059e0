"""One table of lies, told to every hosted provider by a proxy between its real SDK and its emulator.

Whatever the proxy says: nothing that lowtide created is left, nothing of another lease is used or ended, no end is
claimed that did not happen, and no error is anything else than lowtide's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests import coreweave_emulator, daytona_emulator, e2b_emulator, modal_emulator, runloop_emulator
from tests.lying_proxy import (
    CLOSE_DELIMITED,
    Answer,
    Lie,
    Proxy,
    changed,
    committed,
    proxying,
    undone,
)

from lowtide.errors import LowtideError, SandboxFileNotFoundError, SandboxUnavailableError
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.leases import Lifecycle
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers.base import ProcessSpec, SandboxInfo, SandboxSpec
from lowtide.providers.inside import link
from lowtide.providers.registry import provider_class

pytestmark = pytest.mark.timeout(180)


def _full(*rows: Any) -> list[Any]:
    """Rows of a table that go through the same code as the others do: in the full run alone."""
    return [pytest.param(row, marks=pytest.mark.full) for row in rows]


WINDOW_SECONDS = 4.0
LAG_SECONDS = 2.0
_PATH = "/tmp/file"
_EMULATORS: dict[str, Any] = {
    "e2b": e2b_emulator,
    "daytona": daytona_emulator,
    "runloop": runloop_emulator,
    "modal": modal_emulator,
    "coreweave": coreweave_emulator,
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=module.needs_emulator) for name, module in _EMULATORS.items()],
)
def emulator(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    for handle in _EMULATORS[request.param].serving():
        yield request.param, handle


@dataclass
class World:
    """One provider behind the proxy, with a ledger of its own."""

    name: str
    emulator: Any
    proxy: Proxy
    provider: Any
    life: Lifecycle

    def alive(self) -> set[str]:
        return {one["sandbox_id"] for one in self.emulator.state()["sandboxes"][self.name]}

    def lease(self) -> tuple[Lease, SandboxSpec]:
        lease = self.life.new_lease(self.provider)
        return lease, SandboxSpec(labels=lease.labels)

    async def create(self) -> Any:
        lease, spec = self.lease()
        return await self.life.create(self.provider, lease, spec)

    async def rows(self) -> list[Lease]:
        return await self.life.ledger.leases()

    async def until_settled(self) -> None:
        """Every row of a create that failed is settled, by its owner alone."""
        deadline = time.monotonic() + 60
        while [row for row in await self.rows() if row.state is not LeaseState.LIVE]:
            assert time.monotonic() < deadline, await self.rows()
            await asyncio.sleep(0.05)


@pytest.fixture
async def world(
    emulator: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    name, handle = emulator
    monkeypatch.setenv("LOWTIDE_SIGNALS", "off")
    monkeypatch.setenv("LOWTIDE_CREATE_WINDOW_SECONDS", str(WINDOW_SECONDS))
    life = Lifecycle(ledger=SqliteLedger(tmp_path / "ledger.db"), path=tmp_path)
    async with proxying(name, handle.environment) as (proxy, environment):
        provider = provider_class(name).connect(environment)
        world = World(name, handle, proxy, provider, life)
        assert world.alive() == set()
        yield world
        proxy.lies.clear()
        handle.faults.clear()
        for row in await world.rows():
            await life.end(provider, row.lease_id, grace_seconds=0.0, force=True)
        await world.until_settled()
        assert world.alive() == set()
        if life._renewing is not None:
            life._renewing.cancel()
        await provider.aclose()
        life.ledger.close()  # type: ignore[attr-defined]


# The create


async def test_a_create_that_is_refused_after_the_service_has_committed_leaves_nothing(world: World) -> None:
    """Every refusal at once. The list lags, so that the first looks find nothing."""
    refusals = list(world.proxy.dialect.refusals)
    world.emulator.faults.add("list-lags", seconds=LAG_SECONDS, count=None)

    async def refuse(forward: Any) -> Answer:
        await forward()
        return world.proxy.dialect.refused(refusals.pop())

    world.proxy.lies["create"] = refuse
    raised = await asyncio.gather(*(world.create() for _ in list(refusals)), return_exceptions=True)
    # A conflict may be this lease's own sandbox, found again by its name.
    assert all(isinstance(one, LowtideError | SandboxInfo) for one in raised), raised
    assert sum(isinstance(one, LowtideError) for one in raised) >= len(raised) - 1, raised
    assert len(world.proxy.answers["create"]) >= len(raised)
    del world.proxy.lies["create"]
    await world.until_settled()
    assert world.alive() == {one.sandbox_id for one in raised if isinstance(one, SandboxInfo)}


async def test_an_answer_with_the_sandbox_of_another_lease_is_not_used(world: World) -> None:
    other = await world.create()
    answer = world.proxy.answers["create"][-1]
    world.proxy.lies["create"] = committed(answer)
    made = await _attempted(world)
    assert made != other.sandbox_id
    world.proxy.lies.clear()
    await _ended_all_but(world, other.sandbox_id)
    assert world.alive() == {other.sandbox_id}


async def test_an_answer_without_labels_costs_one_read(world: World) -> None:
    world.proxy.lies["create"] = changed(world.proxy.dialect.without_labels)
    made = await world.create()
    assert world.alive() == {made.sandbox_id}
    assert len(world.proxy.answers["create"]) == len(world.proxy.answers["get"]) == 1
    assert "list" not in world.proxy.answers


@pytest.mark.parametrize(
    "id", ["../../other", "", *_full("box/../other?x=", "a b", "x" * 5000)], ids=lambda id: repr(id)[:20]
)
async def test_an_id_that_cannot_be_one_is_put_into_no_request(world: World, id: str) -> None:
    world.proxy.lies["create"] = changed(lambda answer: world.proxy.dialect.with_id(answer, id))
    before = len(world.proxy.paths)
    made = await _attempted(world)
    assert made != id
    assert all(part not in path for path in world.proxy.paths[before:] for part in ("other", "x" * 5000))
    world.proxy.lies.clear()
    await _ended_all_but(world)
    assert world.alive() == set()


@pytest.mark.parametrize("kind", ["empty", "noise", "page", *_full("cut", "list", "nothing", "null")])
async def test_an_answer_that_cannot_be_read_is_an_error_of_lowtides(world: World, kind: str) -> None:
    assert world.proxy.dialect.unreadable.keys() <= {
        "empty",
        "noise",
        "page",
        "cut",
        "list",
        "nothing",
        "null",
    }
    answer = world.proxy.dialect.unreadable.get(kind)
    if answer is None:
        pytest.skip("another wire")
    world.proxy.lies["create"] = committed(answer)
    world.emulator.faults.add("list-lags", seconds=LAG_SECONDS, count=None)
    made = await _attempted(world)
    if made is not None:  # found again by the name
        assert world.alive() == {made}
    world.proxy.lies.clear()
    await _ended_all_but(world)
    assert world.alive() == set()


@pytest.mark.parametrize("status", [302, 307, *_full(301, 308)])
@pytest.mark.parametrize("operation", ["create", "get", "destroy"])
async def test_a_redirect_is_not_followed(world: World, status: int, operation: str) -> None:
    if world.proxy.dialect.grpc:
        pytest.skip("gRPC has no redirects")
    made = await world.create()
    async with proxying(world.name, world.emulator.environment) as (elsewhere, _):
        redirect = Answer(status=status, headers={"Location": f"{elsewhere.url}/elsewhere"})
        world.proxy.lies[operation] = undone(redirect)
        with pytest.raises(LowtideError):
            if operation == "create":
                await world.provider.create(world.lease()[1])
            else:
                await getattr(world.provider, operation)(made.sandbox_id)
        assert elsewhere.paths == []
    assert made.sandbox_id in world.alive()


# The end


async def test_an_end_that_is_answered_about_another_sandbox_is_not_believed(world: World) -> None:
    other, made = await world.create(), await world.create()
    assert await world.provider.destroy(other.sandbox_id)
    answer = world.proxy.answers["destroy"][-1]
    told = []

    async def once(forward: Any) -> Answer:
        told.append(1)
        return answer if len(told) == 1 else await forward()

    world.proxy.lies["destroy"] = once
    with contextlib.suppress(SandboxUnavailableError):
        assert await world.provider.destroy(made.sandbox_id)
        assert made.sandbox_id not in world.alive()
    assert told


@pytest.mark.parametrize("operation", ["destroy", "get", "both"])
async def test_a_not_found_that_speaks_of_another_sandbox_proves_nothing(
    world: World, operation: str
) -> None:
    other, made = await world.create(), await world.create()
    lie = undone(world.proxy.dialect.missing(other.sandbox_id))
    _tell(world, lie, operation)
    claimed = None
    with contextlib.suppress(SandboxUnavailableError, TimeoutError):
        async with asyncio.timeout(4):
            claimed = await world.provider.destroy(made.sandbox_id)
    assert claimed is None or made.sandbox_id not in world.alive()
    if operation != "destroy" and made.sandbox_id in world.alive():
        with pytest.raises(SandboxUnavailableError):
            await world.provider.get(made.sandbox_id)


async def test_an_answer_about_another_sandbox_is_not_this_ones(world: World) -> None:
    if world.name == "modal":
        pytest.skip("Modal's answers about a sandbox do not name it")
    other, made = await world.create(), await world.create()
    await world.provider.get(other.sandbox_id)
    world.proxy.lies["get"] = undone(world.proxy.answers["get"][-1])
    with pytest.raises(SandboxUnavailableError):
        await world.provider.get(made.sandbox_id)


# What is inside


async def test_a_proxys_not_found_is_no_missing_file(world: World) -> None:
    if world.name != "e2b":
        pytest.skip("files are read through the program inside")
    made = await world.create()
    await _write(world, made.sandbox_id, _CONTENT)
    for body in (b"<html>404</html>", b'{"code": 404, "message": "path does not exist"}'):
        world.proxy.lies["read"] = undone(Answer(status=404, body=body))
        assert await _read(world, made.sandbox_id) == _CONTENT
        with pytest.raises(SandboxFileNotFoundError):
            await _read(world, made.sandbox_id, "/tmp/missing")


@pytest.mark.parametrize("kept", [200 << 10, *_full(0, 1 << 10)])
async def test_a_cut_answer_is_no_whole_file(world: World, kept: int) -> None:
    if world.name != "e2b":
        pytest.skip("files are read through the program inside")
    made = await world.create()
    await _write(world, made.sandbox_id, _CONTENT)

    async def cut(forward: Any) -> Answer:
        return Answer(status=CLOSE_DELIMITED, body=(await forward()).body[:kept])

    world.proxy.lies["read"] = cut
    with contextlib.suppress(SandboxUnavailableError):
        assert await _read(world, made.sandbox_id) == _CONTENT
    assert world.proxy.answers["read"]


async def test_a_channel_that_never_opens_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_GREETING_SECONDS", 2.0)
    service, url = world.proxy.service.encode(), world.proxy.url.encode()
    # Daytona's answer says where the sandbox is reached.
    world.proxy.lies["create"] = changed(lambda one: replace(one, body=one.body.replace(service, url)))
    made = await world.create()
    told = asyncio.Event()

    async def silent(forward: Any) -> Answer:
        told.set()
        await asyncio.Event().wait()
        raise AssertionError

    world.proxy.lies["start"] = silent
    async with asyncio.timeout(20):
        with pytest.raises(SandboxUnavailableError):
            await world.provider.start_process(made.sandbox_id, ProcessSpec(argv=("true",)))
    assert told.is_set()


_CONTENT = bytes(range(256)) * (600 << 2)


async def _write(world: World, sandbox_id: str, content: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield content

    await world.provider.write_file(sandbox_id, _PATH, chunks(), size=len(content))


async def _read(world: World, sandbox_id: str, path: str = "") -> bytes:
    return b"".join([chunk async for chunk in world.provider.read_file(sandbox_id, path or _PATH)])


def _tell(world: World, lie: Lie, operation: str) -> None:
    for one in ("destroy", "get") if operation == "both" else (operation,):
        world.proxy.lies[one] = lie


async def _attempted(world: World) -> str | None:
    """The id of what a create returned, or None where it raised what it may."""
    try:
        return str((await world.create()).sandbox_id)
    except SandboxUnavailableError:
        return None


async def _ended_all_but(world: World, *kept: str) -> None:
    for row in await world.rows():
        if row.sandbox_id not in kept:
            await world.life.end(world.provider, row.lease_id, grace_seconds=0.0, force=True)
    await world.until_settled()
