"""The guardian itself is killed: at each of its steps, alone and together with its owner."""

from __future__ import annotations

import os
import time

import pytest

from tests.crash.world import World

STEPS = [
    "guardian:started",
    "guardian:locked",
    "guardian:listening",
    "guardian:owner-died",
    "end:before-claim",
    "end:claimed",
    "end:destroyed",
    "end:gone",
    "guardian:leaving",
]


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step_while_a_neighbour_lives(world: World, step: str) -> None:
    """The neighbour notices and starts a new one, which goes on."""
    # Whoever of the two starts it: nobody waits for a guardian, and the neighbour's may be the first to come up.
    world.environ["LOWTIDE_GUARDIAN_CRASH_AT"] = f"{step}@{world.home}/struck"
    actor = world.start("hold", 3)
    actor.until("READY")
    peer = world.start_peer()
    actor.kill()
    world.wait_until_clean()
    world.end_peer(peer)
    world.wait_until_clean()
    world.until_struck()


@pytest.mark.parametrize("step", STEPS[:-1])
def test_killed_together_with_its_owner_and_then_the_next_process_cleans_up(world: World, step: str) -> None:
    actor = world.start("hold", 3, LOWTIDE_GUARDIAN_CRASH_AT=f"{step}@{world.home}/struck")
    actor.until("READY")
    actor.kill()
    world.until_struck()  # on a busy machine the next process would still find it alive
    time.sleep(0.3)
    # Whatever happened to the guardian: the next lowtide process on this machine starts one.
    other = world.start("normal_exit", 1)
    assert other.wait() == 0
    world.wait_until_clean()


def test_owner_and_guardian_die_in_the_same_instant_and_sweep_cleans_up(world: World) -> None:
    actor = world.start("hold", 5)
    actor.until("READY")
    pid = world.guardian()
    os.kill(pid, 19)  # frozen, so that it cannot act between the two kills
    actor.kill()
    os.kill(pid, 9)
    time.sleep(0.3)
    assert world.existing() == actor.made()
    world.sweep()
    world.wait_until_clean()


def test_an_owner_notices_its_guardians_death_and_starts_another(world: World) -> None:
    actor = world.start("hold", 2)
    actor.until("READY")
    first = world.kill_guardian()
    second = world.guardian()
    assert second != first
    actor.kill()
    world.wait_until_clean()


def test_there_is_one_guardian_for_many_owners_and_it_leaves_when_idle(world: World) -> None:
    actors = [world.start("hold", 1) for _ in range(4)]
    for actor in actors:
        actor.until("READY")
    pid = world.guardian()
    with open(f"/proc/{pid}/status") as file:
        memory = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert memory < 30_000
    for actor in actors:
        actor.kill()
    world.wait_until_clean()
    deadline = time.monotonic() + 15
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, "the guardian stays although nothing is left to watch"
        time.sleep(0.1)
    assert world.log().count("leaves: nothing left") == 1


def test_the_guardian_is_no_child_of_its_owner(world: World) -> None:
    """A program that waits for all its children must not get ours."""
    actor = world.start("hold", 1)
    actor.until("READY")
    with open(f"/proc/{world.guardian()}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    assert parent != actor.process.pid
    actor.kill()
    world.wait_until_clean()


@pytest.mark.faulty  # the faulty provider's directory stands for a credential
def test_no_credential_reaches_the_ledger_the_log_or_a_process_title(world: World) -> None:
    secret = "s3cret-in-the-environment"
    actor = world.start("hold", 1, LOWTIDE_FAULTY_DIR=str(world.service.directory), E2B_API_KEY=secret)
    actor.until("READY")
    pid = world.guardian()
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        assert secret.encode() not in file.read()
    actor.kill()
    world.wait_until_clean()
    for path in world.home.iterdir():
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
