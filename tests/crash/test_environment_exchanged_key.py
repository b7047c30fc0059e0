"""The key to an account is exchanged while sandboxes run that were made with the old one."""

from __future__ import annotations

import time

import pytest

from tests.crash.world import World

pytestmark = pytest.mark.faulty  # lets its key be exchanged

OWNER = """
    box = Sandbox.run(**OPTIONS)
    say("MADE", box.sandbox_id)
    sys.stdin.readline()
    os.environ["LOWTIDE_FAULTY_KEY"] = "new"
    boxes = make(1)
    wait_to_be_struck()
"""


def exchange(world: World, lease_seconds: str = "300") -> str:
    """An owner that has made one sandbox with the old key and one with the new. The first one's id."""
    world.service.exchange_key("old")
    actor = world.start_program(OWNER, LOWTIDE_FAULTY_KEY="old", LOWTIDE_LEASE_SECONDS=lease_seconds)
    first = actor.until("MADE").split()[1]
    world.guardian()
    world.service.exchange_key("new")
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()
    actor.until("READY")
    return first


def test_the_guardian_ends_with_the_new_key_what_the_old_one_made(world: World) -> None:
    exchange(world)
    world.actors[0].kill()
    world.wait_until_clean()


def test_the_guardian_renews_with_the_new_key_what_the_old_one_made(world: World) -> None:
    first = exchange(world, "9")
    until = time.monotonic() + 12.0
    while time.monotonic() < until:
        assert first in world.existing(), f"wrongly ended: {world.log()[-2000:]}"
        time.sleep(0.1)
    world.actors[0].kill()
    world.wait_until_clean()


def test_a_sweep_and_a_delete_by_id_find_the_row_of_the_old_key(world: World) -> None:
    world.service.exchange_key("old")
    made = [
        world.start_program("boxes = make(1); wait_to_be_struck()", LOWTIDE_FAULTY_KEY="old") for _ in "ab"
    ]
    ids = [actor.until("MADE").split()[1] for actor in made]
    world.kill_guardian()
    world.service.exchange_key("new")
    world.environ["LOWTIDE_FAULTY_KEY"] = "new"
    deleted = world.start_program(f"Sandbox.delete({ids[0]!r}, provider=PROVIDER).result(); say('DELETED')")
    deleted.until("DELETED")
    assert deleted.wait() == 0
    assert world.existing() == {ids[1]}
    assert [row[0] for row in world.open_rows()] == [ids[1]]
    for actor in made:
        actor.kill()
    world.sweep()
    world.wait_until_clean()
