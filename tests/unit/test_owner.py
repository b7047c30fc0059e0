"""Owner identity: what is proof of death, and what is only a failure to look."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import machine
from lowtide.lifecycle.owner import Owner, Standing
from lowtide.lifecycle.sqlite_ledger import SqliteLedger

SAY = "import json; from lowtide.lifecycle.owner import Owner; print(json.dumps(Owner.current().as_dict()), flush=True)"
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces as root")


def started(*command: str) -> tuple[subprocess.Popen[str], Owner]:
    """A process that says who it is and waits for a line."""
    process = subprocess.Popen(
        [*command, sys.executable, "-c", f"{SAY}; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Owner(**json.loads(process.stdout.readline()))


def ended(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=30)


def seen_from(owner: Owner, *command: str) -> str:
    """What another process says about it."""
    program = (
        "import json, sys; from lowtide.lifecycle.owner import Owner\n"
        "print(Owner(**json.loads(sys.argv[1])).verdict().standing)"
    )
    done = subprocess.run(
        [*command, sys.executable, "-c", program, json.dumps(owner.as_dict())],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_an_owner_lives_until_its_process_ends() -> None:
    process, owner = started()
    assert owner.verdict().standing is Standing.ALIVE
    ended(process)
    assert owner.verdict().standing is Standing.DEAD
    assert owner.alive() is False


MADE_UP = "{pid} (python) 0 {parent}" + " 0" * 17 + " 12345" + " 0" * 5 + " 274919872112" + " 0" * 16
"""What QEMU's user mode shows a process as its own /proc/self/stat."""


def test_an_owner_that_is_shown_a_made_up_start_time_lives_until_its_process_ends(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(MADE_UP.format(pid=os.getpid(), parent=os.getppid()))
    own = machine._read_process(str(tmp_path), own=True)
    assert own == machine.RunningProcess(0, "")
    process, owner = started()
    owner = replace(owner, start_time=own.start_time, image=own.image, life="only-its-import")
    assert owner.verdict().standing is Standing.ALIVE
    ended(process)
    assert owner.verdict().standing is Standing.DEAD


@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("qemu-x86_64") is None, reason="needs QEMU's user mode"
)
def test_an_emulated_owner_lives_until_its_process_ends() -> None:
    process, owner = started("qemu-x86_64")
    assert owner.verdict().standing is Standing.ALIVE
    ended(process)
    assert owner.verdict().standing is Standing.DEAD


def test_a_reused_pid_is_another_owner() -> None:
    me = Owner.current()
    assert replace(me, start_time=me.start_time - 1).verdict().standing is Standing.DEAD


def test_an_exec_is_seen_without_any_link(tmp_path: Path) -> None:
    program = f"import os, sys; {SAY}; input(); os.execv(sys.executable, [sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        owner = Owner(**json.loads(process.stdout.readline()))
        assert owner.verdict().standing is Standing.ALIVE
        process.stdin.write("\n")
        process.stdin.flush()
        until_is(owner, Standing.DEAD)
        assert "exec" in owner.verdict().why
        process.communicate("\n", timeout=30)


def until_is(owner: Owner, standing: Standing) -> None:
    deadline = time.monotonic() + 30
    while owner.verdict().standing is not standing:
        assert time.monotonic() < deadline, owner.verdict()
        time.sleep(0.01)


def test_two_imports_in_one_process_are_two_owners_that_live() -> None:
    program = (
        "import sys; from lowtide.lifecycle.owner import Owner; first = Owner.current()\n"
        "for name in [n for n in sys.modules if n.startswith('lowtide')]: del sys.modules[name]\n"
        "from lowtide.lifecycle.owner import Owner; second = Owner.current()\n"
        "assert first.as_dict() != second.as_dict() and first != second\n"
        "twin = Owner(**first.as_dict())\n"
        "assert twin.verdict().standing == 'alive' and not twin.replaced_by(second)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_first_thread_that_has_ended_is_not_the_end() -> None:
    program = (
        f"import ctypes, sys, threading; {SAY}\n"
        "threading.Thread(target=sys.stdin.readline).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        owner = Owner(**json.loads(process.stdout.readline()))
        deadline = time.monotonic() + 30
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert owner.verdict().standing is Standing.ALIVE
        process.kill()


def test_a_machine_without_free_descriptors_proves_nothing() -> None:
    process, owner = started()
    program = (
        "import json, os, resource, sys; from lowtide.lifecycle.owner import Owner\n"
        "owner = Owner(**json.loads(sys.argv[1])); owner.verdict()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "try:\n"
        "    while True: os.open('/', os.O_RDONLY)\n"
        "except OSError: pass\n"
        "print(owner.verdict().standing)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(owner.as_dict())],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "unknown"
    finally:
        ended(process)


@ROOT_ONLY
def test_from_another_pid_namespace_nothing_can_be_told() -> None:
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    inside, there = started(*unshare)
    outside, here = started()
    try:
        assert there.verdict().standing is Standing.UNKNOWN
        assert there.alive() is None
        assert "pid namespace" in there.verdict().why
        assert seen_from(here, *unshare) == "unknown"
    finally:
        ended(inside)
        ended(outside)


@ROOT_ONLY
def test_a_proc_of_another_pid_namespace_proves_no_life() -> None:
    """`unshare --pid` without a /proc of its own: the numbers there are of other processes."""
    program = (
        "import subprocess, sys; from dataclasses import replace\n"
        "from lowtide.lifecycle.owner import Owner\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "owner = replace(Owner.current(), pid=child.pid)\n"
        "print(owner.verdict().standing, end=' ')\n"
        "child.communicate(b'\\n'); print(owner.verdict().standing)"
    )
    done = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["unknown", "dead"]


@ROOT_ONLY
def test_a_renamed_machine_is_the_same_machine() -> None:
    process, owner = started()
    renamed = ("unshare", "--uts", "sh", "-c", 'hostname another-name && exec "$@"', "sh")
    try:
        assert seen_from(owner, *renamed) == "alive"
    finally:
        ended(process)
    assert seen_from(owner, *renamed) == "dead"


@pytest.mark.skipif(not machine.machine_number(), reason="this machine has no number, only a name")
def test_another_machine_and_another_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Owner.current()
    assert replace(me, machine_id="another").alive() is None
    monkeypatch.setenv("LOWTIDE_HOME", str(tmp_path))
    other = replace(me, boot_id="another")
    assert other.verdict().standing is Standing.PERHAPS_RESTARTED  # nothing tells
    lock = tmp_path / machine.boot_lock_name("another")
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert other.verdict().standing is Standing.UNKNOWN
        assert "same machine-id" in other.verdict().why
    assert other.verdict().standing is Standing.RESTARTED
    machine.remove_ended_boots(tmp_path, {"another"})
    assert lock.exists()
    machine.remove_ended_boots(tmp_path, ())
    assert not lock.exists()


def test_a_process_holds_its_boot_until_it_ends(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lowtide import machine\n"
        "machine.hold_boot(Path(sys.argv[1])); print(machine.boot_id(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        boot = process.stdout.readline().strip()
        assert machine.boot_is_over(boot, tmp_path) is False
        process.kill()
    assert machine.boot_is_over(boot, tmp_path) is True


@pytest.mark.parametrize(
    ("filesystem", "shared"),
    [
        ("ext4 /dev/sda1 rw", True),
        ("nfs4 server:/home rw,local_lock=none", True),
        ("nfs server:/home rw,nolock,local_lock=all", False),
        ("virtiofs home rw", False),
        ("fuse.sshfs server: rw", False),
    ],
)
def test_a_free_lock_is_evidence_only_where_other_machines_would_see_it(
    filesystem: str, shared: bool
) -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:40 / /srv/a\\040home rw shared:1 - {filesystem}\n"
        "3 1 0:41 / /srv/a rw - ext4 /dev/other rw\n"
    )
    assert machine.locks_are_shared(Path("/srv/a home/me"), mounts) is shared
    assert machine.locks_are_shared(Path("/srv/ahome"), mounts)


FIRST_VERSION = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE lease (
  lease_id TEXT PRIMARY KEY, provider TEXT NOT NULL, account TEXT NOT NULL, state TEXT NOT NULL,
  sandbox_id TEXT, host TEXT NOT NULL, boot_id TEXT NOT NULL, pid INTEGER NOT NULL, start_time INTEGER NOT NULL,
  tags TEXT NOT NULL, session TEXT, keep TEXT NOT NULL, keep_for_seconds REAL NOT NULL, created_at REAL NOT NULL,
  expires_at REAL, max_lifetime_at REAL, lifetime_seconds REAL, kept_until REAL, attempts INTEGER NOT NULL,
  reason TEXT, recovery TEXT NOT NULL, changed_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE history (
  lease_id TEXT NOT NULL, at REAL NOT NULL, before TEXT, after TEXT NOT NULL, pid INTEGER NOT NULL, why TEXT NOT NULL
);
INSERT INTO meta VALUES ('ledger_id', 'abc'), ('version', '1');
"""
A_ROW = (
    "INSERT INTO lease (lease_id, provider, account, state, sandbox_id, host, boot_id, pid, start_time, tags, keep,"
    " keep_for_seconds, created_at, attempts, recovery, changed_at)"
    " VALUES (?, 'p', 'a', 'live', 's', ?, ?, ?, ?, '[]', 'never', 1, 1, 0, '{}', 1)"
)


def test_a_ledger_of_the_first_version_is_brought_along(tmp_path: Path) -> None:
    """Its rows stay: a living owner's is seen to live, a dead one's is not proven dead, an old boot's may be."""
    me = Owner.current()
    host = f"{me.host}.{machine.machine_number()[:12]}"
    db = sqlite3.connect(tmp_path / "ledger.db")
    db.executescript(FIRST_VERSION)
    db.execute(A_ROW, ("one", host, me.boot_id, me.pid, me.start_time))
    db.execute(A_ROW, ("two", host, me.boot_id, me.pid, me.start_time + 1))
    db.execute(A_ROW, ("three", host, "earlier", me.pid, me.start_time))
    db.execute(A_ROW, ("four", "elsewhere.0123456789ab", me.boot_id, me.pid, me.start_time))
    db.commit()

    ledger = SqliteLedger(tmp_path / "ledger.db")
    assert ledger.ledger_id == "abc"
    if machine.machine_number():
        by_id = {lease.lease_id: lease.owner.verdict().standing for lease in asyncio.run(ledger.leases())}
        assert by_id == {
            "one": Standing.ALIVE,
            "two": Standing.UNKNOWN,
            "three": Standing.PERHAPS_RESTARTED,
            "four": Standing.UNKNOWN,
        }
    # A process of that version goes on writing.
    db.execute(A_ROW, ("five", host, me.boot_id, me.pid, me.start_time))
    db.commit()
    db.close()
    ledger.close()
    again = SqliteLedger(tmp_path / "ledger.db")
    assert len(asyncio.run(again.leases())) == 5
    again.close()


@ROOT_ONLY
def test_a_forked_child_with_its_parents_number_in_another_namespace_is_another_owner() -> None:
    program = (
        "import ctypes, os; from lowtide.lifecycle.owner import Owner\n"
        "parent = Owner.current()\n"
        "assert ctypes.CDLL(None).unshare(0x20000000) == 0\n"  # CLONE_NEWPID: for the children
        "child = os.fork()\n"
        "if child == 0:\n"
        "    same = Owner.current() == parent or Owner.current().namespace == parent.namespace\n"
        "    os._exit(3 if os.getpid() != parent.pid else 4 if same else 0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    place = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
    done = subprocess.run([*place, sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0


def test_a_program_that_changes_its_directory_has_one_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    environ = {"LOWTIDE_HOME": f"relative-{tmp_path.name}"}
    first = machine.state_directory(environ)
    assert first == tmp_path / environ["LOWTIDE_HOME"]
    monkeypatch.chdir(tmp_path / "below")
    assert machine.state_directory(environ) == first
