"""The guardian over weeks, after a restart, without credentials, and with a clock that is set. In this process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.lifecycle import clock, guardian_process, owner_watch
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.guardian import Guardian
from lowtide.lifecycle.guardian_workers import Credentials, NoCredentials, Start
from lowtide.lifecycle.lease import Lease, LeaseState, new_lease_id
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.owner_watch import OwnerWatch
from lowtide.lifecycle.sweep import Action, sweep
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.testing.faulty import FaultyProvider, FaultyService


class MovedClock:
    """Both clocks of this process, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, self.stepped = 0.0, 0.0
        wall, machine = time.time, time.clock_gettime
        monkeypatch.setattr(time, "time", lambda: wall() + self.passed + self.stepped)
        monkeypatch.setattr(time, "clock_gettime", lambda which: machine(which) + self.passed)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch)


@pytest.fixture
def service(tmp_path: Path) -> FaultyService:
    return FaultyService(tmp_path / "service")


@pytest.fixture
def provider(service: FaultyService) -> FaultyProvider:
    return FaultyProvider(service.directory)


@pytest.fixture
async def guardian(
    tmp_path: Path, service: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Guardian]:
    monkeypatch.setenv("LOWTIDE_FAULTY_DIR", str(service.directory))
    (tmp_path / "home").mkdir(mode=0o700)
    made = Guardian(tmp_path / "home")
    yield made
    for task in [*made.ending.values(), *made._tasks]:
        task.cancel()
    made.watch.close()
    await made.workers.aclose()
    made.ledger.close()


async def settled(guardian: Guardian) -> bool:
    """One look, with everything it began."""
    stays = await guardian._look()
    while guardian.ending or guardian._tasks:
        await asyncio.wait([*guardian.ending.values(), *guardian._tasks])
        await asyncio.sleep(0)
    return stays


async def made_by(
    guardian: Guardian, provider: FaultyProvider, owner: Owner, lifetime: float | None = 300.0, **fields: Any
) -> Lease:
    """A sandbox with its row, as that owner would have made it."""
    lease = Lease(
        lease_id=new_lease_id(),
        provider="faulty",
        account=provider.account,
        owner=owner,
        ledger_id=guardian.ledger.ledger_id,
        state=LeaseState.LIVE,
        lifetime_seconds=lifetime,
        expires_at=time.time() + (lifetime or 0.0),
        renewed=Instant.now(),
        began=Instant.now(),
        **fields,
    )
    info = await provider.create(SandboxSpec(labels=lease.labels, lifetime_seconds=lifetime))
    lease = replace(lease, sandbox_id=info.sandbox_id)
    await guardian.ledger.intend(lease)
    return lease


def dead() -> Owner:
    return replace(Owner.current(), start_time=1)


# Weeks.


async def test_an_unattended_week_without_credentials(
    guardian: Guardian, provider: FaultyProvider, moved: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead owner's lease that nobody here may end, and a living owner, for a week."""
    log = guardian.path / "guardian.log"
    handler = guardian_process.BoundedLog(log)
    guardian_process.log.addHandler(handler)
    monkeypatch.setattr(guardian_process.log, "level", logging.INFO)
    guardian_process.log.manager._clear_cache()  # type: ignore[attr-defined]
    monkeypatch.setattr(guardian_process, "LOG_BYTES", 3000)
    stuck = await made_by(guardian, provider, dead(), None)
    alive = await made_by(guardian, provider, Owner.current(), 3600.0)
    gone = await made_by(guardian, provider, dead(), None)
    await guardian.ledger.change(gone.lease_id, LeaseState.GONE, before=set(LeaseState), why="over")
    refused = 0

    def refuse(*_: object) -> FaultyProvider:
        nonlocal refused
        refused += 1
        raise NoCredentials("no key here")

    light = guardian.workers.light
    monkeypatch.setattr(
        guardian.workers,
        "light",
        lambda lease, *key: refuse() if lease.lease_id == stuck.lease_id else light(lease, *key),
    )
    try:
        for _ in range(8 * 24 * 12):  # every five minutes, and a day more for what ended at its beginning
            assert await settled(guardian)
            moved.passed += 300
    finally:
        guardian_process.log.removeHandler(handler)
        handler.close()
    assert 8 * 20 < refused < 8 * 24 + 20  # backed off to once an hour
    history = await guardian.ledger.history(stuck.lease_id)
    assert len(history) < 10
    assert log.stat().st_size < 5000
    assert (await guardian.ledger.get(stuck.lease_id)) is not None
    assert await guardian.ledger.get(gone.lease_id) is None  # settled a week ago
    assert (guardian.path / "ledger.db-wal").stat().st_size < 2_000_000
    row = await guardian.ledger.get(alive.lease_id)
    assert row is not None
    assert row.state is LeaseState.LIVE
    assert len(guardian.retries) <= 2


async def test_a_guardian_that_only_lacks_credentials_leaves_and_says_so(
    guardian: Guardian, provider: FaultyProvider, moved: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made_by(guardian, provider, dead(), None)

    def refuse(*_: object) -> None:
        raise NoCredentials("no key here")

    monkeypatch.setattr(guardian.workers, "light", refuse)
    looks = 1
    while await settled(guardian):
        moved.passed += 1.6  # as long as it waits for more to do
        looks += 1
        assert looks < 20
    assert looks > 1
    assert "no credentials here for 1 leases" in guardian._why_it_leaves()


async def test_credentials_that_arrive_later_are_used_at_once(
    guardian: Guardian, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_FAULTY_DIR", str(guardian.path / "another"))
    lease = await made_by(guardian, provider, dead(), None)
    await settled(guardian)
    assert lease.lease_id in guardian.stuck
    owner = Start(tell=lambda message: None)
    guardian._learn(Credentials("faulty", provider.account, provider.credentials()), owner)
    await settled(guardian)
    row = await guardian.ledger.get(lease.lease_id)
    assert row is not None
    assert row.state is LeaseState.GONE


async def test_credentials_release_a_lease_that_is_younger_than_the_last_look(
    guardian: Guardian, provider: FaultyProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_FAULTY_DIR", str(guardian.path / "another"))
    owner = dead()
    lease = await made_by(guardian, provider, owner, None)
    await guardian._end_what_it_left(owner, "it has ended")  # before any look
    await asyncio.wait(guardian.ending.values())
    assert lease.lease_id in guardian.stuck
    start = Start(tell=lambda message: None)
    guardian._learn(Credentials("faulty", provider.account, provider.credentials()), start)
    await settled(guardian)
    row = await guardian.ledger.get(lease.lease_id)
    assert row is not None
    assert row.state is LeaseState.GONE


async def test_a_failed_end_is_tried_again_later_each_time(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService, moved: MovedClock
) -> None:
    lease = await made_by(guardian, provider, dead(), None)
    service.fault("get", times=1, fail=True)
    waits = [guardian.retries.failed(lease.lease_id) for _ in range(14)]
    assert waits[:4] == [2, 4, 8, 16]
    assert waits[-1] == 3600
    await settled(guardian)
    assert service.sandboxes()
    moved.passed += 3601
    await settled(guardian)
    assert not service.sandboxes()


# Clocks.


@pytest.mark.parametrize("step", [-100.0, -86_400.0, 10.0, 100.0])
async def test_a_clock_that_is_set_changes_no_renewal_and_ends_nothing(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService, moved: MovedClock, step: float
) -> None:
    lease = await made_by(guardian, provider, Owner.current(), 30.0, max_lifetime_at=time.time() + 90)
    await settled(guardian)
    moved.stepped += step
    for _ in range(12):  # a minute
        await settled(guardian)
        assert lease.sandbox_id in service.sandboxes()
        moved.passed += 5
        service.move_clock(5)
    moved.passed += 40
    await settled(guardian)
    assert not service.sandboxes()  # the maximum lifetime, by the seconds that have passed


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
async def test_a_clock_that_is_set_moves_no_keep(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService, moved: MovedClock, step: float
) -> None:
    await made_by(guardian, provider, Owner.current(), None, kept_until=time.time() + 600)
    (row,) = await guardian.ledger.leases()
    await guardian.ledger.change(
        row.lease_id, LeaseState.KEPT, before={LeaseState.LIVE}, kept_until=time.time() + 600
    )
    await settled(guardian)
    moved.stepped += step
    moved.passed += 590
    await settled(guardian)
    assert service.sandboxes()
    moved.passed += 20
    await settled(guardian)
    assert not service.sandboxes()


# After a restart.


def before_the_restart() -> Owner:
    return replace(Owner.current(), boot_id="another")


async def test_after_a_restart_a_hosted_one_that_somebody_renews_is_left(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService, moved: MovedClock
) -> None:
    """The machine was cloned: the owner lives in the other copy."""
    lease = await made_by(guardian, provider, before_the_restart(), 100.0)
    for _ in range(30):
        await settled(guardian)
        moved.passed += 20
        service.move_clock(20)
        await provider.renew(lease.sandbox_id or "", 100.0)
        assert lease.sandbox_id in service.sandboxes()
        assert (await sweep(guardian.ledger, {"faulty": provider}))[0].action is Action.LEFT


async def test_after_a_restart_a_guardian_without_a_valid_key_leaves(
    guardian: Guardian, service: FaultyService, provider: FaultyProvider, moved: MovedClock
) -> None:
    lease = await made_by(guardian, provider, before_the_restart(), 100.0)
    service.exchange_key("another")
    looks = 1
    while await settled(guardian):
        moved.passed += 1.6  # as long as it waits for more to do
        looks += 1
        assert looks < 20
    assert lease.lease_id in guardian.stuck
    assert "no credentials here for 1 leases" in guardian._why_it_leaves()


async def test_after_a_restart_a_guardian_that_gets_no_answer_leaves_after_a_day(
    guardian: Guardian, service: FaultyService, provider: FaultyProvider, moved: MovedClock
) -> None:
    await made_by(guardian, provider, before_the_restart(), 100.0)
    service.fault("get", times=1000, fail=True)
    while await settled(guardian):
        moved.passed += 600.0
        assert moved.passed < 3 * 86_400
    assert moved.passed > 86_400


async def test_after_a_restart_a_hosted_one_that_nobody_renews_is_ended(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService, moved: MovedClock
) -> None:
    lease = await made_by(guardian, provider, before_the_restart(), 100.0)
    await settled(guardian)
    moved.passed += 60
    await settled(guardian)
    assert lease.sandbox_id in service.sandboxes()  # not a whole lease period yet
    moved.passed += 60  # the service's own clock stands still: only the guardian can end it
    await settled(guardian)
    assert not service.sandboxes()


async def test_not_found_at_the_provider_settles_a_row_whoevers_it_is(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService
) -> None:
    elsewhere = await made_by(guardian, provider, replace(Owner.current(), machine_id="another"))
    restarted = await made_by(guardian, provider, before_the_restart())
    alive = await made_by(guardian, provider, Owner.current())
    for lease in (elsewhere, restarted, alive):
        await provider.destroy(lease.sandbox_id or "")
    dry = await sweep(guardian.ledger, {"faulty": provider}, dry_run=True)
    assert sorted(one.action for one in dry) == [Action.LEFT, Action.WOULD_END, Action.WOULD_END]
    await sweep(guardian.ledger, {"faulty": provider})
    states = [(await guardian.ledger.get(one.lease_id)).state for one in (elsewhere, restarted, alive)]  # type: ignore[union-attr]
    assert states == [LeaseState.GONE, LeaseState.GONE, LeaseState.LIVE]


async def test_a_living_owners_sandbox_that_is_not_there_any_more_is_settled_and_not_renewed_for_ever(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService, moved: MovedClock
) -> None:
    lease = await made_by(guardian, provider, Owner.current())
    service.move_clock(400)
    moved.passed += 200
    await settled(guardian)
    row = await guardian.ledger.get(lease.lease_id)
    assert row is not None
    assert row.state is LeaseState.GONE


async def test_what_cannot_be_seen_is_left_and_said(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await made_by(guardian, provider, replace(Owner.current(), namespace="1/1"))
    await settled(guardian)
    (found,) = await sweep(guardian.ledger, {"faulty": provider})
    assert found.action is Action.LEFT
    assert "pid namespace" in found.why
    assert "lowtide rm" in found.why
    assert lease.sandbox_id in service.sandboxes()


# Owners without a pidfd.


@pytest.mark.parametrize("problem", [errno.EMFILE, errno.ENOSYS, errno.EPERM, None])
async def test_without_a_pidfd_an_owner_is_looked_at_instead(
    monkeypatch: pytest.MonkeyPatch, problem: int | None
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(problem, os.strerror(problem or 0))

    if problem is None:  # a Python that was built without it
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(owner_watch, "POLL_SECONDS", 0.02)
    told: list[Owner] = []
    watch = OwnerWatch(lambda owner, why: told.append(owner), descriptors=10)
    words = [sys.executable, "-c", "input(1)"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # in the midst of its exec it is no process that anybody could be
        owner = of(process.pid)
        watch.look(owner)
        assert owner in watch
        await asyncio.sleep(0.3)
        assert told == []
        process.communicate(b"\n")
    await eventually(lambda: told == [owner])
    watch.close()


def of(pid: int) -> Owner:
    from lowtide import machine

    found = machine.running_process(pid)
    assert found is not None
    life = f"another:{found.random}"
    return replace(Owner.current(), pid=pid, start_time=found.start_time, image=found.image, life=life)


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = clock.seconds() + 30
    while not condition():
        assert clock.seconds() < deadline
        await asyncio.sleep(0.01)


def test_labels_of_an_owner_fit_everywhere() -> None:
    marks = Labels(lease_id="a", ledger_id="b", owner=Owner.current().label)
    assert all(len(value) <= 59 for value in marks.as_dict().values())


async def test_the_next_one_may_begin_before_this_one_has_tidied_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    (tmp_path / "home").mkdir(mode=0o700)
    guardian = Guardian(tmp_path / "home", leaves=lambda: order.append("leaves"))

    async def tidy(accounts: object, *, leave: bool) -> None:
        order.append("tidies up")

    monkeypatch.setattr(guardian.workers, "aclose", tidy)
    monkeypatch.setattr("lowtide.lifecycle.guardian.IDLE_SECONDS", 0.01)
    await guardian.run()
    assert order == ["leaves", "tidies up"]
    guardian.ledger.close()


async def test_a_failed_end_is_tried_again_when_it_is_due(
    guardian: Guardian, provider: FaultyProvider, service: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at the next regular look, which may be five seconds later than the log says."""
    lease = await made_by(guardian, provider, dead())

    async def refuse(*_: object) -> None:
        raise OSError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(guardian, "_end_with", refuse)
        await settled(guardian)
    assert service.sandboxes() == [lease.sandbox_id]
    guardian.changed.clear()
    await asyncio.wait_for(guardian.changed.wait(), 60)
    await settled(guardian)
    assert service.sandboxes() == []
