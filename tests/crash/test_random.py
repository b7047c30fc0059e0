"""kill -9 at random instants of processes that create and stop all the time."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.crash.world import World

KILLS = int(os.environ.get("LOWTIDE_CRASH_KILLS", "24"))
"""In all, per provider; `make crash` sets 300."""
ROUNDS = 4


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_at_random_instants(world: World, number: int, chance: random.Random) -> None:
    peer = world.start_peer()
    kills = max(1, KILLS // ROUNDS)
    world.cases = kills
    done = 0
    while done < kills:
        together = min(kills - done, chance.randint(1, 3))
        actors = [
            world.start("busy", chance.randint(1, 20), ACTOR_SEED=str(chance.random()))
            for _ in range(together)
        ]
        for actor in actors:
            actor.until("READY")
        for actor in actors:
            time.sleep(chance.uniform(0.0, 0.8))
            if chance.random() < 0.15:
                world.kill_guardian()
            actor.kill()
        done += together
        world.wait_until_clean()
    world.end_peer(peer)
    world.wait_until_clean()
