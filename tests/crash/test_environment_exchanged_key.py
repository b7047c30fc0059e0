"""The key to an account is exchanged while sandboxes run that were made with the old one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.environments import another_boot
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


# The key is gone: nothing can be asked, or the service never answers.


def until_left(guardian: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/{guardian}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_guardian_that_only_has_a_revoked_key_leaves(world: World) -> None:
    world.service.exchange_key("old")
    owner = world.start_program("boxes = make(1); wait_to_be_struck()", LOWTIDE_FAULTY_KEY="old")
    owner.until("READY")
    guardian = world.guardian()
    world.service.exchange_key("lost")
    owner.kill()
    until_left(guardian, 30)
    assert owner.made() <= world.existing()
    world.environ["LOWTIDE_FAULTY_KEY"] = "lost"  # somebody has it after all
    world.sweep()
    world.wait_until_clean()


def test_a_guardian_with_a_revoked_key_leaves_also_after_a_restart(world: World, tmp_path: Path) -> None:
    world.service.exchange_key("old")
    before = world.start(
        "hold", 1, LOWTIDE_FAULTY_KEY="old", LOWTIDE_LEASE_SECONDS="9", **another_boot(tmp_path)
    )
    before.until("READY")
    (guardian,) = [int(line.split()[4]) for line in logged(world, " watches ")]
    os.kill(guardian, signal.SIGSTOP)
    before.kill()
    os.kill(guardian, signal.SIGKILL)
    world.service.exchange_key("lost")
    other = world.start_program("OPTIONS['provider'] = 'local'\nmake(1)")  # the first one after the restart
    assert other.wait() == 0
    until_left(int(logged(world, " watches ", 2)[-1].split()[4]), 30)
    assert "no credentials here for 1 leases" in world.log()
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "forget", "--yes", *before.made()],
        env=world.environ,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not world.open_rows()
    world.service.move_clock(60)  # and its provider-side lifetime is the end of it
    assert not world.existing()


def logged(world: World, words: str, count: int = 1, seconds: float = 30.0) -> list[str]:
    """The lines of the guardians' log with these words, once there are so many."""
    deadline = time.monotonic() + seconds
    while len(found := [line for line in world.log().splitlines() if words in line]) < count:
        assert time.monotonic() < deadline, world.log()
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("call", ["destroy", "get"])
def test_a_guardian_whose_service_never_answers_obeys_sigterm(world: World, call: str) -> None:
    owner = world.start("hold", 2)
    owner.until("READY")
    guardian = world.guardian()
    world.service.fault(call, times=100, hold_seconds=600)
    world.service.fault("destroy", times=100, hold_seconds=600)
    owner.kill()
    logged(world, "left 2 leases")
    os.kill(guardian, signal.SIGTERM)
    until_left(guardian, 20.0 * 2)  # what the docs say it takes at most, twice for a busy machine
    world.service.clear()
    world.sweep()
    world.wait_until_clean()
