"""The ledger is removed, or a row in it is damaged, while owners and guardian use it."""

from __future__ import annotations

import contextlib
import sqlite3
import time

import pytest

from tests.crash.world import Actor, World

pytestmark = pytest.mark.faulty  # outlives its directory's ledger, and shows what is there


def go_on(actor: Actor) -> None:
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()


def until_log(world: World, words: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while words not in world.log():
        assert time.monotonic() < deadline, f"the guardian has not said {words!r}: {world.log()}"
        time.sleep(0.03)


def test_what_was_released_just_before_the_ledger_was_removed_lives_on(world: World) -> None:
    peer = world.start_peer()  # the guardian stays for it
    actor = world.start_program(
        """
        session = Session(provider=PROVIDER)
        box = session.sandbox()
        box.start().result()
        say("MADE", box.sandbox_id)
        sys.stdin.readline()
        session.release(box)
        say("RELEASED")
        sys.stdin.readline()
        """
    )
    released = actor.until("MADE").split()[1]
    world.guardian()
    time.sleep(6)  # it has looked, and remembers the sandbox as its owner's
    go_on(actor)
    actor.until("RELEASED")
    (world.home / "ledger.db").unlink()
    go_on(actor)
    assert actor.wait() == 0
    until_log(world, "the ledger was removed or replaced")
    time.sleep(2)
    assert released in world.existing(), f"wrongly ended: {world.log()}"
    assert (released, "handed-over") in {row[:2] for row in world.rows()}
    world.spared.add(released)
    world.end_peer(peer)
    world.wait_until_clean()


def test_a_damaged_row_takes_nothing_from_the_others(world: World) -> None:
    damaged, other = world.start("hold", 1), world.start("hold", 1)
    damaged.until("READY")
    other.until("READY")
    world.guardian()
    (its,) = damaged.made()
    with contextlib.closing(sqlite3.connect(world.home / "ledger.db", timeout=20)) as db, db:
        db.execute("UPDATE lease SET tags='{{' WHERE lease_id=?", (its,))
    until_log(world, "cannot be read")
    world.spared.add(its)
    other.kill()
    world.wait_until_clean()
    world.sweep()
    assert its in world.existing()  # its owner lives
    with contextlib.closing(sqlite3.connect(world.home / "ledger.db", timeout=20)) as db, db:
        db.execute("UPDATE lease SET tags='[]' WHERE lease_id=?", (its,))
    world.spared.clear()
    damaged.kill()
    world.sweep()
    world.wait_until_clean()


def test_the_owner_of_a_damaged_row_ends_its_sandbox(world: World) -> None:
    actor = world.start_program(
        """
        boxes = make(1)
        sys.stdin.readline()
        """
    )
    (its,) = {actor.until("MADE").split()[1]}
    with contextlib.closing(sqlite3.connect(world.home / "ledger.db", timeout=20)) as db, db:
        db.execute("UPDATE lease SET tags='{{' WHERE lease_id=?", (its,))
    go_on(actor)
    assert actor.wait() == 0
    assert world.existing() == set()
