"""The places of `environments.py` are what they say: a case in a place that did not take would prove nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.crash.environments import (
    Clock,
    Disk,
    container,
    few_descriptors,
    pid_namespace,
    processor_bound,
)
from tests.crash.world import World

SHOW = """
import resource, socket
say("PID", os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
say("HOST", socket.gethostname())
say("FILES", *resource.getrlimit(resource.RLIMIT_NOFILE))
say("PROCESSORS", *os.sched_getaffinity(0))
say("TIME", int(time.time()))
sys.stdin.readline()
say("TIME-AFTER", int(time.time()), time.monotonic_ns())
"""


def namespace(of: object = "self") -> int:
    return os.stat(f"/proc/{of}/ns/pid").st_ino


@pytest.mark.faulty  # or any one: the provider plays no part
def test_a_place_limits_the_program_and_is_left_by_an_honest_kill(world: World) -> None:
    actor = world.start_program(SHOW, within=few_descriptors(48) + processor_bound(0))
    actor.until("TIME")
    assert "FILES 48 48" in actor.lines
    assert "PROCESSORS 0" in actor.lines
    pid = actor.pid()
    actor.kill()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.faulty  # or any one
def test_a_pid_namespace_is_its_own_and_its_init_stays_when_the_program_is_killed(world: World) -> None:
    actor = world.start_program(SHOW, within=pid_namespace())
    pid, inode = map(int, actor.until("PID").split()[1:])
    assert inode != namespace()
    assert inode == namespace(actor.pid())
    assert pid != actor.pid()
    actor.signal(signal.SIGSTOP)
    actor.signal(signal.SIGCONT)
    actor.kill()
    assert actor.process.returncode == 128 + signal.SIGKILL  # as the shell says it: it was there to see it


@pytest.mark.faulty  # or any one
def test_a_container_has_a_name_of_its_own_and_can_be_taken_away_whole(world: World) -> None:
    actor = world.start_program(SHOW, within=container("elsewhere"))
    assert actor.until("HOST") == "HOST elsewhere"
    assert int(actor.until("PID").split()[2]) != namespace()
    pid = actor.pid()
    actor.end_place()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the program outlived its container"
        time.sleep(0.01)


@pytest.mark.faulty  # or any one
def test_a_stepped_clock_moves_while_a_program_runs(world: World, clock: Clock) -> None:
    clock.step(-1000)
    actor = world.start_program(SHOW, **clock.environ)
    before = int(actor.until("TIME").split()[1])
    assert before - time.time() == pytest.approx(-1000, abs=60)
    clock.step(5000)
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()
    after, monotonic = map(int, actor.until("TIME-AFTER").split()[1:])
    assert after - time.time() == pytest.approx(5000, abs=60)
    assert monotonic / 1e9 == pytest.approx(time.monotonic(), abs=60)
    assert actor.wait() == 0


def test_a_disk_fills_up_under_the_worlds_home_and_is_freed(world: World, disk: Disk) -> None:
    actor = world.start("hold", 1)
    actor.until("READY")
    disk.fill()
    disk.free()
    (world.home / "probe").write_bytes(bytes(8192))
    actor.kill()
    world.wait_until_clean()


@pytest.mark.parametrize(
    "place", [few_descriptors(256), processor_bound(0)], ids=["descriptors", "processor"]
)
def test_a_case_runs_in_a_place(world: World, place: tuple[str, ...]) -> None:
    actor = world.start("hold", 2, within=place)
    actor.until("READY")
    actor.kill()
    world.wait_until_clean()
