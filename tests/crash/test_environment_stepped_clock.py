"""A wall clock that is set while things are under way: nothing is ended, given up or left by it."""

from __future__ import annotations

import time

import pytest

from tests.crash.environments import Clock
from tests.crash.world import Actor, World

pytestmark = pytest.mark.faulty  # has a lifetime that runs out, and a clock of its own

ALIVE = """
    boxes = make()
    say("READY")
    sys.stdin.readline()
    say("ALIVE", sum(box.exec(["true"]).result(timeout=60).returncode == 0 for box in boxes))
    results([box.stop() for box in boxes])
"""


def all_alive(world: World, actor: Actor) -> None:
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()
    assert actor.until("ALIVE") == "ALIVE 2"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.parametrize("step", [-100, 100])
def test_leases_are_renewed_after_a_step(world: World, clock: Clock, step: int) -> None:
    actor = world.start_program(ALIVE, LOWTIDE_LEASE_SECONDS="3", **clock.environ)
    actor.until("READY")
    world.guardian()
    clock.step(step)
    until = time.monotonic() + 9.0  # three lifetimes
    while time.monotonic() < until:
        assert world.existing() == actor.made(), f"wrongly ended: {world.log()[-2000:]}"
        time.sleep(0.1)
    all_alive(world, actor)


def test_the_owner_alone_renews_after_a_step(world: World, clock: Clock) -> None:
    actor = world.start_program(
        """
    from lowtide.lifecycle import guardian_link
    guardian_link.launch = lambda *_: None  # a machine on which none can be started
    """
        + ALIVE,
        LOWTIDE_LEASE_SECONDS="3",
        **clock.environ,
    )
    actor.until("READY")
    clock.step(-100)
    until = time.monotonic() + 9.0
    while time.monotonic() < until:
        assert world.existing() == actor.made(), "wrongly ended: nobody renewed it"
        time.sleep(0.1)
    all_alive(world, actor)


def test_a_step_forward_does_not_end_a_lifetime_early(world: World, clock: Clock) -> None:
    actor = world.start_program(
        """
    OPTIONS["max_lifetime_seconds"] = 60
    """
        + ALIVE,
        **clock.environ,
    )
    actor.until("READY")
    world.guardian()
    clock.step(100)
    time.sleep(7.0)  # the guardian has looked at least once
    assert world.existing() == actor.made(), f"wrongly ended: {world.log()[-2000:]}"
    all_alive(world, actor)


@pytest.mark.parametrize("step", [-10, 10])
def test_a_lost_create_is_recovered_across_a_step(world: World, clock: Clock, step: int) -> None:
    world.service.fault("create", hold_seconds=2.0, commit_after_seconds=0.8)
    actor = world.start("hold", 1, **clock.environ)
    until = time.monotonic() + 30
    while world.service.pending():
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(1.0)
    actor.kill()
    clock.step(step)
    world.wait_until_clean()
    time.sleep(2.5)  # when it has surely been committed
    assert world.existing() == set(), "leaked after the clock was set"


@pytest.mark.parametrize("step", [-10, 10])
def test_an_owner_recovers_its_lost_create_across_a_step(world: World, clock: Clock, step: int) -> None:
    world.service.fault("create", hold_seconds=0.5, commit_after_seconds=1.2)
    actor = world.start_program(
        """
        try:
            Sandbox.run(**OPTIONS)
        except Exception as error:
            say("ERROR", type(error).__name__)
        sys.stdin.readline()
        """,
        **clock.environ,
    )
    actor.until("ERROR")
    clock.step(step)
    time.sleep(1.5)
    world.wait_until_clean()
    time.sleep(1.0)
    assert world.existing() == set(), "leaked after the clock was set"
    actor.kill()
