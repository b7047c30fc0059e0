"""Pausing local sandboxes with each kind of freezer that a machine can have, and with none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ordinary_user import UID, OrdinaryUser, why_not
from tests.paused_sandbox import running

ROOT = Path(__file__).parents[2]
GUARDIAN_SECONDS = 30.0


def mounted(kind: str, option: str = "") -> str | None:
    """Where a cgroup filesystem of this kind is."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        rest = fields[fields.index("-") + 1 :]
        if rest[0] == kind and (not option or option in rest[2].split(",")):
            return fields[4]
    return None


def can_freeze() -> bool:
    return os.geteuid() == 0 and (mounted("cgroup2") or mounted("cgroup", "freezer")) is not None


def freezers() -> set[str]:
    found: set[str] = set()
    for place in (mounted("cgroup2"), mounted("cgroup", "freezer")):
        if place is not None:
            for folder, _, _ in os.walk(place):
                if os.path.basename(folder).startswith("lowtide-paused-"):
                    found.add(folder)
    return found


def check(command: list[str], environment: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Run the scenario, kill its process in the end, and see everything end. What it reported, and its stderr."""
    before = freezers()
    owner = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        line = owner.stdout.readline()
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)
        complaints = owner.stderr.read().decode()
    assert line, complaints
    found = json.loads(line)
    until = time.monotonic() + GUARDIAN_SECONDS
    while (left := (running(found["token"]), freezers() - before)) != (0, set()):
        assert time.monotonic() < until, left
        time.sleep(0.05)
    return found, complaints


def without(*places: str | None) -> list[str]:
    """What runs the rest of a command where these are not mounted."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    hide = "".join(f"umount {place} && " for place in places if place is not None)
    return ["unshare", "--mount", "sh", "-c", f'{hide}exec "$@"', "sh"]


def as_this_user(tmp_path: Path, *prefix: str) -> tuple[list[str], dict[str, str]]:
    command = [*prefix, sys.executable, "-W", "always", "-m", "tests.paused_sandbox"]
    return command, {**os.environ, "LOWTIDE_HOME": str(tmp_path / "home")}


@pytest.mark.skipif(not can_freeze(), reason="no freezer for this user")
@pytest.mark.parametrize("kind", ["as it is", "version 1"])
def test_a_timer_does_not_wake_a_paused_sandbox_and_every_end_works_on_it(kind: str, tmp_path: Path) -> None:
    prefix: list[str] = []
    if kind == "version 1":
        if mounted("cgroup", "freezer") is None or mounted("cgroup2") is None:
            pytest.skip("the machine has not both versions")
        prefix = without(mounted("cgroup2"))
    found, complaints = check(*as_this_user(tmp_path, *prefix))
    assert found["ran"] is False
    assert found["left after stop"] == 0
    assert found["left after lifetime"] == 0
    assert "SIGSTOP" not in complaints


@pytest.mark.skipif(os.geteuid() != 0, reason="hides the freezers of this machine, which takes root")
def test_without_a_freezer_a_pause_warns_that_a_timer_can_end_it(tmp_path: Path) -> None:
    prefix = without(mounted("cgroup2"), mounted("cgroup", "freezer"))
    found, complaints = check(*as_this_user(tmp_path, *prefix))
    assert found["left after stop"] == 0
    assert found["left after lifetime"] == 0
    assert "is paused by SIGSTOP" in complaints
    assert "timer" in complaints


@contextlib.contextmanager
def delegated() -> Iterator[Path]:
    """A group of version 2 that belongs to the ordinary user."""
    place = mounted("cgroup2")
    if place is None:
        pytest.skip("no cgroup of version 2 is mounted")
    group = Path(place, f"lowtide-test-{os.getpid()}")
    group.mkdir()
    try:
        for path in (group, *(group / name for name in ("cgroup.procs", "cgroup.subtree_control"))):
            os.chown(path, UID, UID)
        yield group
    finally:
        until = (
            time.monotonic() + GUARDIAN_SECONDS
        )  # the guardian is in it too, and leaves when nothing is left
        while group.exists():
            with contextlib.suppress(OSError):
                group.rmdir()
            assert time.monotonic() < until, (group / "cgroup.procs").read_text()
            time.sleep(0.05)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_an_ordinary_user_with_a_group_of_their_own_pauses_by_the_freezer() -> None:
    with OrdinaryUser() as user, delegated() as group:
        join = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        command = [*join, *user.command("-W", "always", "-m", "tests.paused_sandbox")]
        found, complaints = check(command, dict(os.environ))
        assert found["ran"] is False
        assert found["left after stop"] == 0
        assert found["left after lifetime"] == 0
        assert "SIGSTOP" not in complaints


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_an_ordinary_user_without_one_is_warned() -> None:
    with OrdinaryUser() as user:
        found, complaints = check(
            user.command("-W", "always", "-m", "tests.paused_sandbox"), dict(os.environ)
        )
        assert found["left after stop"] == 0
        assert "is paused by SIGSTOP" in complaints
