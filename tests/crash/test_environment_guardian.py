"""What the guardian meets on the machines people really have: containers that share a home, few descriptors, many
accounts; it is stopped or terminated, its ledger is taken away. Nobody who lives loses a sandbox, nothing is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.lifecycle.guardian_link import connect, lock_name, socket_name
from lowtide.testing import FaultyService
from tests.crash.environments import few_descriptors, pid_namespace
from tests.crash.world import World

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces as root")


LASTING_CONTAINER = (*pid_namespace(init=False), "sh", "-c", '"$@"; exec sleep 100', "init")
"""Whose first process stays when the owner is gone, and with it the guardian in there."""


def stays(condition: Callable[[], bool], seconds: float) -> None:
    """It holds from now on, for that long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.2)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sweep(world: World, *prefix: str, dry_run: bool = False) -> str:
    command = [sys.executable, "-m", "lowtide", "sweep", "--provider", world.provider_name]
    done = subprocess.run(
        [*prefix, *command, *(["--dry-run"] if dry_run else [])],
        env=world.environ,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


# Containers that share a home.


@ROOT_ONLY
def test_owners_in_two_pid_namespaces_share_a_home_and_leave_each_other_alone(world: World) -> None:
    outside = world.start("hold", 2)
    outside.until("READY")
    inside = world.start("hold", 2, within=LASTING_CONTAINER)
    inside.until("READY")
    both = outside.made() | inside.made()
    until(lambda: world.log().count("watches") >= 2)  # each namespace has its own guardian
    assert "pid namespace" in sweep(world, dry_run=True)
    sweep(world)
    sweep(world, *pid_namespace(init=False))
    stays(lambda: both <= world.existing(), 7)  # longer than a guardian's look at the ledger
    # Each is ended by the guardian that can see it die.
    guardians = {int(line.split()[2]) for line in world.log().splitlines() if " watches " in line}
    assert len(guardians) == 2
    inside.signal(signal.SIGKILL)
    until(lambda: not inside.made() & world.existing())
    assert outside.made() <= world.existing()
    outside.kill()
    world.wait_until_clean()
    inside.end_place()


@ROOT_ONLY
@pytest.mark.faulty
def test_what_a_vanished_container_left_is_said_and_settled_once_the_provider_has_ended_it(
    world: World,
) -> None:
    inside = world.start("hold", 2, within=pid_namespace())
    inside.until("READY")
    inside.end_place()  # everything in there, the guardian included
    sweep(world)
    assert inside.made() <= world.existing()
    said = sweep(world, dry_run=True)
    assert said.count("pid namespace") == 2
    assert "rm" in said or "delete it by id" in said
    world.service.move_clock(3600)  # its provider-side lifetime
    assert not world.existing()
    sweep(world)
    assert not world.open_rows()


# Few descriptors, no pidfd.


@pytest.mark.faulty
def test_thirty_owners_and_forty_eight_descriptors(world: World) -> None:
    few = few_descriptors(48)
    owners = [world.start("hold", 1, within=few)]
    owners[0].until("READY")
    world.guardian()
    owners += [world.start("hold", 1, within=few) for _ in range(29)]
    for owner in owners:
        owner.until("READY", 120)
    made = {one for owner in owners for one in owner.made()}
    assert len(made) == 30
    stays(lambda: made <= world.existing(), 8)
    for owner in owners[:15]:
        owner.kill()
    left = {one for owner in owners[15:] for one in owner.made()}
    until(lambda: world.existing() == left)
    for owner in owners[15:]:
        owner.kill()
    world.wait_until_clean()


# The link.

MANY_ACCOUNTS = """
from lowtide.engine import engine
from lowtide.lifecycle.leases import lifecycle

class Account:
    name = "faulty"
    def __init__(self, number): self.account = f"account-{{number}}"
    def credentials(self): return {{"SETTING_OF_" + self.account: "x" * {length}}}

async def tell():
    for number in range({accounts}): lifecycle().guardian.wanted(Account(number))

boxes = make(3)
time.sleep(1)
engine().run(tell())
wait_to_be_struck()
"""


@pytest.mark.faulty
@pytest.mark.parametrize(("length", "accounts"), [(200, 400), (60_000, 40), (2_000_000, 2)])
def test_many_accounts_and_long_environments_do_not_break_the_link(
    world: World, length: int, accounts: int
) -> None:
    owner = world.start_program(MANY_ACCOUNTS.format(length=length, accounts=accounts))
    owner.until("READY")
    guardian = world.guardian()
    stays(lambda: owner.made() <= world.existing(), 6)  # longer than a broken link was once given
    assert world.guardian() == guardian
    assert "link broke" not in world.log()
    owner.kill()
    world.wait_until_clean()


CLOSES_ITS_LINK = """
from lowtide.lifecycle.leases import lifecycle
boxes = make(2)
while lifecycle().guardian._socket is None: time.sleep(0.05)
os.close(lifecycle().guardian._socket.fileno())
wait_to_be_struck()
"""


@pytest.mark.faulty
def test_a_closed_link_of_a_living_owner_is_no_end(world: World) -> None:
    owner = world.start_program(CLOSES_ITS_LINK)
    owner.until("READY")
    stays(lambda: owner.made() <= world.existing(), 6)
    owner.kill()
    world.wait_until_clean()


def test_a_stopped_guardian_holds_up_no_create(world: World) -> None:
    owner = world.start("hold", 1)
    owner.until("READY")
    guardian = world.guardian()
    os.kill(guardian, signal.SIGSTOP)
    waiting = []
    try:
        while (link := connect(world.home)) is not None:  # until nobody else is let in
            waiting.append(link)
            assert len(waiting) < 1000
        other = world.start("hold", 2)
        other.until("READY", 60)
    finally:
        os.kill(guardian, signal.SIGCONT)
        for link in waiting:
            link.close()
    owner.kill()
    other.kill()
    world.wait_until_clean()


# Another user or mount namespace, or less of a root.

LESS_OF_A_ROOT = {
    "user namespace": ("unshare", "--user", "--map-root-user"),
    "no capabilities": ("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
    "read-only control groups": (
        *("unshare", "--mount", "sh", "-c"),
        'for at in /sys/fs/cgroup /sys/fs/cgroup/*/; do mount -o remount,bind,ro "$at"; done 2>/dev/null; exec "$@"',
        "sh",
    ),
}


WITH_LIMITS = """
if PROVIDER == "local": OPTIONS["resources"] = {"limits": {"memory": "128Mi"}}
hold()
"""


@ROOT_ONLY
@pytest.mark.parametrize("place", LESS_OF_A_ROOT)
def test_a_guardian_that_may_do_less_than_the_owner_is_not_its_guardian(world: World, place: str) -> None:
    first = world.start_program('OPTIONS["provider"] = "faulty"\nhold()', 1, within=LESS_OF_A_ROOT[place])
    first.until("READY")
    until(lambda: " watches " in world.log())
    owner = world.start_program(WITH_LIMITS)
    owner.until("READY")
    until(lambda: world.log().count(" watches ") >= 2)
    if world.provider_name == "local":
        time.sleep(6.0)  # by now both watch it; what it leaves is the second one's all the same
    owner.kill()
    until(lambda: not owner.made() & world.existing(), 15)
    first.kill()
    world.wait_until_clean()


# Its socket is taken away.


@pytest.mark.faulty
def test_a_guardian_whose_socket_was_removed_is_found_by_the_next_owner(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = world.start("hold", 1)
    first.until("READY")
    guardian = world.guardian()
    (world.home / socket_name()).unlink()  # as programs do that tidy up below /tmp
    with FaultyService(tmp_path_factory.mktemp("other")) as other:
        # Another account: only who is told of it can end what is there.
        second = world.start("hold", 1, LOWTIDE_FAULTY_DIR=str(other.directory))
        second.until("READY")
        assert world.guardian() == guardian
        time.sleep(1.0)  # it is told
        second.kill()
        other.wait_until_empty(15)
    first.kill()
    world.wait_until_clean()


# Terminated, and the ledger taken away.


@pytest.mark.faulty
def test_a_terminated_guardian_finishes_what_dead_owners_left(world: World) -> None:
    owner = world.start("hold", 3)
    owner.until("READY")
    guardian = world.guardian()
    world.service.fault("destroy", times=3, hold_seconds=1.5)
    owner.kill()
    until(lambda: "owner" in world.log() and "left 3 leases" in world.log())
    os.kill(guardian, signal.SIGTERM)
    until(lambda: not os.path.exists(f"/proc/{guardian}"))
    assert not world.existing()
    assert not world.open_rows()
    assert "told to end" in world.log()


def test_a_guardian_terminated_together_with_its_owner_ends_everything(world: World) -> None:
    """As systemd ends a service: everybody in the group at once."""
    owner = world.start("hold", 2)
    owner.until("READY")
    guardian = world.guardian()
    os.kill(guardian, signal.SIGTERM)
    owner.kill()
    until(lambda: not os.path.exists(f"/proc/{guardian}"))
    assert not world.existing()
    assert not world.open_rows()


def test_an_owner_that_dies_while_the_last_guardian_is_leaving(world: World) -> None:
    # That one takes its time: it has closed its way in, and deletes what the sandboxes before have written.
    path = world.home / lock_name()
    leaving = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(leaving, fcntl.LOCK_EX)
    owner = world.start("hold", 2)
    owner.until("READY")
    owner.kill()
    until(lambda: all(_has_open(one, path) for one in _guardians(world)))  # none is on its way up
    assert owner.made() <= world.existing()
    os.close(leaving)
    world.wait_until_clean()


def _guardians(world: World) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0") if name.isdigit() else []
            if words[-3:] == [b"lowtide.lifecycle.guardian_process", os.fsencode(world.home), b""]:
                found.append(name)
    return found


def _has_open(process: str, path: Path) -> bool:
    try:
        links = [os.readlink(f"/proc/{process}/fd/{fd}") for fd in os.listdir(f"/proc/{process}/fd")]
    except OSError:
        return False
    return str(path) in links


def test_an_owner_that_lives_starts_another_guardian_after_a_termination(world: World) -> None:
    owner = world.start("hold", 2)
    owner.until("READY")
    first = world.guardian()
    os.kill(first, signal.SIGTERM)
    until(lambda: not os.path.exists(f"/proc/{first}"))
    assert world.guardian() != first
    assert owner.made() <= world.existing()
    owner.kill()
    world.wait_until_clean()


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_a_ledger_that_is_taken_away_under_a_living_owner(world: World, what: str, tmp_path: Path) -> None:
    owner = world.start("hold", 2)
    owner.until("READY")
    world.guardian()
    made, ledger_id = owner.made(), world.ledger_id()
    if what == "replaced":  # by somebody's backup
        from lowtide.lifecycle.sqlite_ledger import SqliteLedger

        SqliteLedger(tmp_path / "other.db").close()
        for rest in world.home.glob("ledger.db-*"):
            rest.unlink()
        os.replace(tmp_path / "other.db", world.home / "ledger.db")
    else:
        (world.home / "ledger.db").unlink()
    until(lambda: len(world.open_rows()) == 2, 30)
    if what == "removed":
        assert world.ledger_id() == ledger_id
    provider_side = set(world.service.sandboxes()) if world.provider_name == "faulty" else made
    assert made <= provider_side
    newcomer = world.start("hold", 1)
    newcomer.until("READY")
    owner.kill()
    newcomer.kill()
    until(lambda: not world.open_rows())
    until(lambda: not (world.service.sandboxes() if world.provider_name == "faulty" else world.existing()))


def test_a_ledger_that_is_taken_away_is_no_reason_to_stay(world: World) -> None:
    owner = world.start("hold", 1)
    owner.until("READY")
    guardian = world.guardian()
    (world.home / "ledger.db").unlink()
    owner.kill()
    until(lambda: not os.path.exists(f"/proc/{guardian}"))
    assert not (world.service.sandboxes() if world.provider_name == "faulty" else world.existing())


# What others do to it.


@pytest.mark.faulty  # can hold an end
def test_a_service_that_does_not_answer_holds_up_nobody_else(world: World) -> None:
    stuck = world.start("hold", 66)  # more than are ended at once
    stuck.until("READY", 180)
    other = world.start("hold", 1, LOWTIDE_FAULTY_KEY="another")
    other.until("READY")
    world.guardian()
    world.service.fault("destroy", hold_seconds=30, times=64)
    stuck.kill()
    until(lambda: not world.service.pending())  # all of them wait for their answer
    world.spared |= stuck.made()
    other.kill()
    world.wait_until_clean()
    world.spared.clear()
    world.wait_until_clean(60)


@pytest.mark.faulty
def test_it_holds_no_descriptor_that_the_program_has_inherited(world: World, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    actor = world.start("hold", 1, within=("sh", "-c", f'exec 9>"{lock}"; exec "$@"', "sh"))
    actor.until("READY")
    guardian = world.guardian()
    held = {os.path.realpath(entry) for entry in Path(f"/proc/{guardian}/fd").iterdir()}
    assert str(world.home / "ledger.db") in held  # it can be looked at
    assert str(lock) not in held
    actor.kill()
    world.wait_until_clean()


@pytest.mark.faulty
def test_a_program_that_restarts_itself_without_random_addresses_leaves_nothing(world: World) -> None:
    actor = world.start_program(
        """
        if os.environ["AGAIN"] == "1":
            say("READY")
            time.sleep(30)
            sys.exit()
        make()
        time.sleep(0.6)
        os.environ["AGAIN"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
        """,
        within=("setarch", "-R"),
        AGAIN="0",
    )
    actor.until("READY")
    world.wait_until_clean()
