"""kill -9 at every named instant of the protocol, with a live neighbour under the same ledger."""

from __future__ import annotations

import time

import pytest

from tests.crash.world import World

pytestmark = pytest.mark.usefixtures("peer")

CREATING = ["create:before-intent", "create:intended", "create:answered", "create:live"]
ENDING = ["end:before-claim", "end:claimed", "end:destroyed", "end:gone"]
LEAVING = ["exit:begin", "exit:end"]


def strike(world: World, scenario: str, point: str) -> None:
    actor = world.start(scenario, 3, LOWTIDE_CRASH_AT=point)
    assert actor.wait() == -9
    actor.drain()
    world.check_rows(actor.made())
    world.wait_until_clean()


@pytest.mark.parametrize("which", [1, 3])
@pytest.mark.parametrize("point", CREATING)
def test_killed_while_creating(world: World, point: str, which: int) -> None:
    strike(world, "hold", f"{point}:{which}")


@pytest.mark.parametrize("point", ENDING)
def test_killed_during_stop(world: World, point: str) -> None:
    strike(world, "stop_all", point)


@pytest.mark.parametrize("point", ENDING)
def test_killed_during_session_close(world: World, point: str) -> None:
    strike(world, "session_close", f"{point}:2")


@pytest.mark.parametrize("point", [*LEAVING, *ENDING])
def test_killed_during_exit_hooks(world: World, point: str) -> None:
    strike(world, "normal_exit", point)


@pytest.mark.parametrize("point", ["signal:begin", *ENDING])
def test_killed_during_a_signal_handler(world: World, point: str) -> None:
    actor = world.start("hold", 3, LOWTIDE_CRASH_AT=point)
    actor.until("READY")
    actor.process.terminate()
    assert actor.wait() == -9
    world.check_rows(actor.made())
    world.wait_until_clean()


def test_killed_while_in_use(world: World) -> None:
    actor = world.start("hold", 5)
    actor.until("READY")
    actor.kill()
    world.check_rows(actor.made())
    world.wait_until_clean()


@pytest.mark.faulty  # can be struck inside its call
@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("create", {"die": "before"}),
        ("create", {"die": "committed"}),
        ("destroy", {"die": "before"}),
        ("destroy", {"die": "committed"}),
    ],
)
def test_killed_inside_the_providers_call(world: World, call: str, fault: dict[str, str]) -> None:
    world.service.fault(call, **fault)
    actor = world.start("stop_all", 2)
    assert actor.wait() == -9
    world.wait_until_clean()
    assert not world.service.pending()


@pytest.mark.faulty  # can hold a request
def test_killed_with_the_request_in_flight(world: World) -> None:
    world.service.fault("create", hold_seconds=30)
    actor = world.start("hold", 1)
    while len(world.existing()) < 3:
        assert actor.process.poll() is None
        time.sleep(0.01)
    actor.kill()
    world.wait_until_clean()
    assert not world.service.pending()


@pytest.mark.faulty  # commits late
def test_killed_before_a_late_commit(world: World) -> None:
    world.service.fault("create", commit_after_seconds=1.0)
    actor = world.start("hold", 1)
    while world.service.pending():
        time.sleep(0.002)
    time.sleep(0.05)  # the request has been taken; now it is on its way
    actor.kill()
    world.wait_until_clean()
    assert world.existing() == world.spared


@pytest.mark.faulty  # fails on demand
@pytest.mark.parametrize(
    "deletes", [{"fail": True, "times": 3}, {"rate_limit": 0.2, "times": 3}, {"stuck": True, "times": 2}]
)
def test_killed_while_deletes_fail(world: World, deletes: dict[str, object]) -> None:
    actor = world.start("hold", 3)
    actor.until("READY")
    world.service.fault("destroy", **deletes)
    actor.kill()
    world.wait_until_clean(40)
    assert not world.service.pending()
