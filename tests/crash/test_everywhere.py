"""The matrix's core on every provider there is: engines and emulators too."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.crash.world import World

pytestmark = [pytest.mark.everywhere, pytest.mark.timeout(600)]


@pytest.mark.parametrize("point", ["create:answered", "create:live", "end:claimed", "end:destroyed"])
def test_killed_at_an_instant(world: World, point: str) -> None:
    actor = world.start("stop_all", 2, LOWTIDE_CRASH_AT=point)
    assert actor.wait(180) == -9
    actor.drain()
    world.check_rows(actor.made())
    world.wait_until_clean()


def test_killed_in_use_beside_a_living_neighbour(world: World) -> None:
    peer = world.start_peer()
    actor = world.start("hold", 3)
    actor.until("READY", 180)
    actor.kill()
    world.wait_until_clean()
    world.end_peer(peer)
    world.wait_until_clean()


def test_terminated(world: World) -> None:
    actor = world.start("in_session", 2)
    actor.until("READY", 180)
    actor.process.terminate()
    assert actor.wait(120) == -signal.SIGTERM
    world.wait_until_clean()


def test_owner_and_guardian_killed_together(world: World) -> None:
    actor = world.start("hold", 2)
    actor.until("READY", 180)
    guardian = world.guardian()
    os.kill(guardian, signal.SIGSTOP)
    actor.kill()
    os.kill(guardian, signal.SIGKILL)
    time.sleep(0.3)
    assert actor.made() <= world.existing()
    world.sweep()
    world.wait_until_clean()


def test_killed_at_a_random_instant(world: World, chance: random.Random) -> None:
    actor = world.start("busy", 4, ACTOR_SEED=str(chance.random()))
    actor.until("READY", 180)
    time.sleep(chance.uniform(0.0, 3.0))
    actor.kill()
    world.wait_until_clean()
