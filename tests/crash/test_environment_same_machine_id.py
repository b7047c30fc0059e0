"""Two machines made from one image have the same machine-id, and share a home: the other boot is no restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.environments import another_boot
from tests.crash.world import World


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def guardians(world: World) -> list[int]:
    return [int(line.split()[4]) for line in world.log().splitlines() if " watches " in line]


def sweep(world: World, environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "lowtide", "sweep", "--provider", world.provider_name]
    subprocess.run(command, env={**world.environ, **environ}, check=True, capture_output=True, timeout=120)


@pytest.mark.also
def test_the_sandboxes_of_an_owner_on_the_other_machine_are_left(world: World, tmp_path: Path) -> None:
    here = world.start("hold", 2)
    here.until("READY")
    world.guardian()
    other = another_boot(tmp_path)
    there = world.start("hold", 1, **other)
    there.until("READY")
    until(lambda: len(guardians(world)) == 2)  # each machine has its own
    sweep(world, other)
    sweep(world, {})
    both = here.made() | there.made()
    deadline = time.monotonic() + 7.0  # longer than a guardian's look at the ledger
    while time.monotonic() < deadline:
        assert both <= world.existing(), f"wrongly ended: {world.log()[-2000:]}"
        time.sleep(0.1)
    there.kill()
    until(lambda: not there.made() & world.existing())
    assert here.made() <= world.existing()
    here.kill()
    world.wait_until_clean()


@pytest.mark.local  # a hosted one may outlive the machine, and is asked for
def test_after_a_restart_the_lock_is_free_and_what_was_left_is_removed(world: World, tmp_path: Path) -> None:
    before = world.start("hold", 2, **another_boot(tmp_path))
    before.until("READY")
    until(lambda: len(guardians(world)) == 1)
    (guardian,) = guardians(world)
    os.kill(guardian, signal.SIGSTOP)
    before.kill()
    os.kill(guardian, signal.SIGKILL)
    assert before.made() <= world.existing()
    assert world.start("normal_exit", 1).wait() == 0  # the first process after the restart
    world.wait_until_clean()


@pytest.mark.local
def test_a_kept_sandbox_of_the_other_machine_is_left_to_that_machine(world: World, tmp_path: Path) -> None:
    """Also once it is due: its processes are there, and only there can they be ended."""
    other = another_boot(tmp_path)
    there = world.start_program(
        """
        box = Sandbox.run(**OPTIONS, keep="always", keep_for_seconds=2)
        say("MADE", box.sandbox_id)
        box.stop().result()
        wait_to_be_struck()
        """,
        **other,
    )
    there.until("READY")
    until(lambda: len(guardians(world)) == 1)
    (guardian,) = guardians(world)
    os.kill(guardian, signal.SIGSTOP)  # it comes late
    here = world.start("hold", 1)
    here.until("READY")
    time.sleep(2.0)
    sweep(world, {})
    deadline = time.monotonic() + 6.0  # longer than a guardian's look at the ledger
    while time.monotonic() < deadline:
        assert there.made() <= world.existing(), f"wrongly ended: {world.log()[-2000:]}"
        time.sleep(0.1)
    os.kill(guardian, signal.SIGCONT)
    until(lambda: not there.made() & world.existing())
    there.kill()
    here.kill()
    world.wait_until_clean()
