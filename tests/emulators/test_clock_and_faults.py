"""The clock's timers and the registry of faults, by themselves."""

from __future__ import annotations

import asyncio

import pytest

from lowtide.emulators.clock import Clock
from lowtide.emulators.faults import Fault, FaultName, Faults
from lowtide.errors import ValidationError


async def test_moving_the_clock_runs_what_became_due_and_waits_for_it() -> None:
    clock, done = Clock(), []

    async def act(name: str) -> None:
        await asyncio.sleep(0)
        done.append(name)

    clock.at(clock.now() + 100, lambda: act("late"))
    clock.at(clock.now() + 10, lambda: act("early"))
    cancelled = clock.at(clock.now() + 10, lambda: act("cancelled"))
    cancelled.cancel()
    await clock.advance(50)
    assert done == ["early"]
    await clock.advance(60)
    assert done == ["early", "late"]


async def test_a_timer_set_by_a_timer_runs_in_the_same_move() -> None:
    clock, done = Clock(), []

    async def second() -> None:
        done.append("second")

    async def first() -> None:
        clock.at(clock.now() - 1, second)

    clock.at(clock.now() + 5, first)
    await clock.advance(10)
    assert done == ["second"]


async def test_timers_run_as_time_passes() -> None:
    clock, done = Clock(), asyncio.Event()

    async def act() -> None:
        done.set()

    clock.at(clock.now() + 0.05, act)
    await asyncio.wait_for(done.wait(), 30)


async def test_a_failing_timer_stops_nothing() -> None:
    clock, done = Clock(), []

    async def fail() -> None:
        raise RuntimeError("on purpose")

    async def act() -> None:
        done.append(1)

    clock.at(clock.now() + 1, fail)
    clock.at(clock.now() + 2, act)
    await clock.advance(5)
    assert done == [1]


def test_a_fault_is_taken_count_times_by_the_calls_it_matches() -> None:
    faults = Faults()
    faults.add(Fault(name=FaultName.KILL_FAILS, provider="e2b", match={"job": "a"}, count=2))
    assert faults.take(FaultName.KILL_FAILS, "daytona", {"job": "a"}) is None
    assert faults.take(FaultName.KILL_FAILS, "e2b", {"job": "b"}) is None
    assert faults.take(FaultName.KILL_HANGS, "e2b", {"job": "a"}) is None
    taken = [faults.take(FaultName.KILL_FAILS, "e2b", {"job": "a"}) for _ in range(3)]
    assert [one is not None for one in taken] == [True, True, False]


@pytest.mark.parametrize(
    "given",
    [
        {"name": "no-such-fault"},
        {"name": "kill-fails", "count": 0},
        {"name": "kill-fails", "seconds": -1},
        {"name": "kill-fails", "status": 200},
        {"name": "kill-fails", "match": {"a": 1}},
        {"name": "kill-fails", "color": "red"},
    ],
)
def test_a_wrong_fault_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Fault.from_dict(given)
