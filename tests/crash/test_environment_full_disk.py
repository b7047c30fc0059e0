"""The ledger's disk is full when the provider has answered: nothing is left all the same."""

from __future__ import annotations

import time

import pytest

from tests.crash.environments import Disk
from tests.crash.stalls import Stalls
from tests.crash.world import Actor, World


def go_on(actor: Actor) -> None:
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()


def until(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.03)


@pytest.mark.faulty  # can hold a request
def test_what_was_made_just_then_is_ended_and_the_error_says_so(world: World, disk: Disk) -> None:
    world.service.fault("create", hold_seconds=2.0)
    actor = world.start_program(
        """
        try:
            Sandbox.run(**OPTIONS)
        except Exception as error:
            say("ERROR", type(error).__name__, "|", error)
        sys.stdin.readline()
        """
    )
    until(world.existing)
    disk.fill()
    said = actor.until("ERROR")
    assert said.startswith("ERROR LedgerError")
    assert "was ended again" in said
    assert world.existing() == set()
    disk.free()
    world.wait_until_clean()  # its row, while its owner lives
    assert actor.process.poll() is None
    go_on(actor)
    assert actor.wait() == 0


def test_leaving_the_block_ends_it_and_the_row_is_settled_once_there_is_room(
    world: World, disk: Disk
) -> None:
    actor = world.start_program(
        """
        with Sandbox.run(**OPTIONS) as box:
            say("MADE", box.sandbox_id)
            sys.stdin.readline()
        say("LEFT", box.stop().result().outcome)
        sys.stdin.readline()
        """
    )
    actor.until("MADE")
    disk.fill()
    go_on(actor)
    assert actor.until("LEFT") in ("LEFT destroyed", "LEFT already_gone")
    assert world.existing() == set()
    assert world.open_rows() != []
    disk.free()
    world.wait_until_clean()
    assert actor.process.poll() is None
    go_on(actor)
    assert actor.wait() == 0


@pytest.mark.faulty  # can refuse an end
def test_an_end_that_fails_meanwhile_is_tried_again_while_the_owner_lives(world: World, disk: Disk) -> None:
    actor = world.start_program(
        """
        box = Sandbox.run(**OPTIONS)
        say("MADE", box.sandbox_id)
        sys.stdin.readline()
        try:
            box.stop().result()
        except Exception as error:
            say("ERROR", type(error).__name__)
        sys.stdin.readline()
        """,
        LOWTIDE_END_SECONDS="1",
    )
    actor.until("MADE")
    world.service.fault("destroy", stuck=True, times=10_000)
    disk.fill()
    go_on(actor)
    actor.until("ERROR")
    assert len(world.existing()) == 1
    world.service.clear()
    until(lambda: not world.existing())  # nobody asked again, and the disk is still full
    disk.free()
    world.wait_until_clean()
    go_on(actor)
    assert actor.wait() == 0


def test_a_normal_exit_with_a_full_disk_leaves_nothing(world: World, disk: Disk) -> None:
    actor = world.start_program(
        """
        boxes = make()
        say("READY")
        sys.stdin.readline()
        """
    )
    actor.until("READY")
    disk.fill()
    go_on(actor)
    assert actor.wait() == 0
    assert world.existing() == set()
    disk.free()
    world.wait_until_clean()


def test_another_owner_that_the_full_ledger_shows_is_respected(world: World, disk: Disk) -> None:
    first = world.start_program(
        """
        box = Sandbox.run(**OPTIONS)
        say("MADE", box.sandbox_id)
        sys.stdin.readline()
        say("FIRST", box.stop().result().outcome)
        """
    )
    sandbox_id = first.until("MADE").split()[1]
    second = world.start_program(
        f"""
        session = Session(provider=PROVIDER)
        box = session.from_id({sandbox_id!r}, take=True).result()
        say("ADOPTED")
        sys.stdin.readline()
        say("ALIVE", box.exec(["true"]).result(timeout=60).returncode)
        session.close().result()
        """
    )
    second.until("ADOPTED")
    disk.fill()
    go_on(first)
    assert first.until("FIRST") == "FIRST left"
    disk.free()
    go_on(second)
    assert second.until("ALIVE") == "ALIVE 0"
    assert (first.wait(), second.wait()) == (0, 0)
    world.wait_until_clean()


def test_a_kill_with_a_full_disk_leaves_nothing(world: World, disk: Disk) -> None:
    actor = world.start("hold", 2)
    actor.until("READY")
    world.guardian()
    disk.fill()
    actor.kill()
    started, stalls = time.monotonic(), Stalls(world.home)
    while world.existing():
        assert time.monotonic() - started < world.bound + stalls.seconds(), (
            f"leaked after a kill: {world.log()}"
        )
        stalls.sleep(0.03)
    assert world.open_rows() != []
    disk.free()
    world.wait_until_clean(20)  # its rows: they are tried again, later each time
