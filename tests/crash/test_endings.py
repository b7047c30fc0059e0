"""Every way to leave: each ends what the process made, spares the neighbour, keeps the exit status."""

from __future__ import annotations

import signal
import time

import pytest

from tests.crash.world import World

pytestmark = pytest.mark.usefixtures("peer")

HOLDING = ["hold", "with_block", "in_session", "worker_threads", "in_asyncio"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGQUIT]
)
@pytest.mark.parametrize("scenario", HOLDING)
def test_a_signal(world: World, scenario: str, number: signal.Signals) -> None:
    actor = world.start(scenario, 1 if scenario == "with_block" else 3)
    actor.until("READY")
    actor.process.send_signal(number)
    # Python turns an unhandled Ctrl+C into death by SIGINT; the others die of theirs. As without us.
    assert actor.wait() == -number
    world.wait_until_clean()


@pytest.mark.parametrize(
    ("scenario", "status"),
    [
        ("normal_exit", 0),
        ("unhandled_exception", 1),
        ("os_exit", 7),
        ("sys_exit_in_thread", 0),
        ("task_cancelled_while_creating", 0),
        ("stop_all", 0),
        ("session_close", 0),
    ],
)
def test_leaving(world: World, scenario: str, status: int) -> None:
    actor = world.start(scenario, 4)
    assert actor.wait() == status
    actor.drain()
    assert "READY" in actor.lines
    world.check_rows(actor.made())
    world.wait_until_clean()


def test_a_swallowed_interrupt_disables_nothing(world: World) -> None:
    actor = world.start("swallowed_interrupt", 2)
    actor.until("READY")
    actor.process.send_signal(signal.SIGINT)
    actor.until("SWALLOWED")
    assert actor.wait() == 0
    actor.drain()
    assert len(actor.made()) == 4
    world.wait_until_clean()


@pytest.mark.parametrize("scenario", ["own_handler_before", "own_handler_after"])
def test_the_programs_own_handler_decides(world: World, scenario: str) -> None:
    actor = world.start(scenario, 2)
    actor.until("READY")
    actor.process.terminate()
    assert actor.wait() == 9
    actor.drain()
    assert f"HANDLER {signal.SIGTERM:d}" in actor.lines
    world.wait_until_clean()


def test_a_handler_that_goes_on_keeps_its_sandboxes(world: World) -> None:
    actor = world.start("handler_that_goes_on", 2)
    actor.until("READY")
    actor.process.terminate()
    assert actor.until("STILL") == "STILL True"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.faulty  # hangs on demand
def test_a_second_interrupt_leaves_at_once_and_the_guardian_takes_over(world: World) -> None:
    actor = world.start("hold", 3)
    actor.until("READY")
    world.service.fault("destroy", hold_seconds=300, times=3)
    actor.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert actor.process.poll() is None
    actor.process.send_signal(signal.SIGINT)
    actor.wait(10)
    world.wait_until_clean()


@pytest.mark.faulty  # hangs on demand
def test_leaving_is_bounded_when_the_provider_hangs(world: World) -> None:
    actor = world.start("hold", 3, LOWTIDE_EXIT_SECONDS="2")
    actor.until("READY")
    world.service.fault("destroy", hold_seconds=300, times=3)
    actor.process.terminate()
    assert actor.wait(15) == -signal.SIGTERM
    world.wait_until_clean()


@pytest.mark.parametrize("scenario", ["fork_child_exits", "fork_child_uses_its_own"])
def test_a_forked_child_touches_nothing_of_its_parents(world: World, scenario: str) -> None:
    actor = world.start(scenario, 2)
    assert actor.until("CHILD") == "CHILD 0 True"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.parametrize("scenario", ["parent_of_a_fork_dies", "daemonised"])
def test_a_surviving_child_does_not_keep_its_parents_sandboxes(world: World, scenario: str) -> None:
    actor = world.start(scenario, 2)
    actor.until("READY")
    world.wait_until_clean()
    actor.wait()


def test_an_owner_replaced_by_exec_counts_as_gone(world: World) -> None:
    actor = world.start("replaced_by_exec", 2)
    actor.until("READY")
    world.wait_until_clean(10)
    assert actor.process.poll() is None
    actor.kill()


def test_an_owner_that_restarts_itself_ends_what_it_left(world: World) -> None:
    actor = world.start("replaced_by_itself", 2)
    assert actor.wait() == 0
    world.wait_until_clean()


def test_a_crashed_owner_with_keep_on_failure_keeps_until_the_expiry(world: World) -> None:
    actor = world.start("kept_on_failure", 2)
    actor.until("READY")
    made = actor.made()
    actor.kill()
    deadline = time.monotonic() + 10
    while {row[1] for row in world.rows() if row[0] not in world.spared} != {"kept"}:
        assert time.monotonic() < deadline, world.rows()
        time.sleep(0.05)
    assert made <= world.existing()
    world.wait_until_clean(30)
