"""What `local` makes before anybody asks for it goes with its process, also when that owned nothing any more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.crash.world import World

pytestmark = pytest.mark.local  # alone has rooms


def rooms(world: World) -> list[Path]:
    directory = world.home / "local" / "rooms"
    return list(directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize("after_seconds", [0.0, 0.05, 0.5])  # while it is made, and when it is
def test_a_process_killed_while_it_makes_a_room_leaves_no_directory(
    world: World, after_seconds: float
) -> None:
    actor = world.start_program(
        """
        for _ in range(2):
            Sandbox.run(**OPTIONS).stop().result()
        wait_to_be_struck()
        """
    )
    until = time.monotonic() + 60
    while not rooms(world):
        assert time.monotonic() < until, "no room was made"
        time.sleep(0.001)
    time.sleep(after_seconds)
    actor.kill()
    until = time.monotonic() + 30
    while left := rooms(world):
        assert time.monotonic() < until, f"leaked after 30 s: {left}"
        time.sleep(0.05)
    world.wait_until_clean()
