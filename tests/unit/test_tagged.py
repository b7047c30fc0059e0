"""The shell text that ends a command's whole tree, run by real shells on real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.providers import tagged

SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]


def argv(shell: str, script: str) -> list[str]:
    return [*(["busybox", "sh"] if shell == "busybox" else [shell]), "-c", script]


def living(tag: int, program: str = "") -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            limits, stat, comm = ((entry / name).read_text() for name in ("limits", "stat", "comm"))
            if f" {tag} " in limits and ") Z " not in stat and program in comm:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def tag() -> Iterator[int]:
    tag = tagged.new_tag()
    yield tag
    for pid in living(tag):
        os.kill(pid, signal.SIGKILL)


def started(shell: str, tag: int, script: str, sleepers: int) -> subprocess.Popen[bytes]:
    """Once so many of its processes are asleep; some shells stay besides, some turn into their last command."""
    child = subprocess.Popen(argv(shell, f"{tagged.enter(tag)};{script}"))
    deadline = time.monotonic() + 20
    while len(living(tag, "sleep")) < sleepers:
        assert time.monotonic() < deadline, "the tree did not start"
        time.sleep(0.02)
    return child


@pytest.mark.parametrize("shell", SHELLS)
def test_terminate_reaches_what_left_the_group_the_session_and_the_environment(shell: str, tag: int) -> None:
    escaped = "env -i setsid sh -c 'sleep 300 & sleep 300' & sleep 300"
    with started(shell, tag, escaped, 3) as child:
        bystander = subprocess.Popen(["sleep", "300"])
        try:
            assert subprocess.run(argv(shell, tagged.terminate(tag, 5.0)), check=False).returncode == 0
            assert living(tag) == []
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()
        child.wait()


@pytest.mark.parametrize("shell", SHELLS)
def test_terminate_kills_what_ignores_it_and_what_is_stopped(shell: str, tag: int) -> None:
    with started(shell, tag, "trap '' TERM; sleep 300 & sleep 300", 2) as child:
        os.kill(living(tag)[-1], signal.SIGSTOP)
        assert subprocess.run(argv(shell, tagged.terminate(tag, 0.1)), check=False).returncode == 0
        assert living(tag) == []
        child.wait()


@pytest.mark.parametrize("shell", SHELLS)
def test_terminate_gives_the_grace_that_was_asked_for(shell: str, tag: int, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"trap 'sleep 0.3; echo tidied >{said}; exit' TERM; while :; do sleep 0.05; done"
    with started(shell, tag, script, 1) as child:
        assert subprocess.run(argv(shell, tagged.terminate(tag, 10.0)), check=False).returncode == 0
        child.wait()
    assert said.read_text() == "tidied\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_alive_looks_at_one_group_where_it_is_given(shell: str, tag: int) -> None:
    with started(shell, tag, "setsid sleep 300 & sleep 300", 2) as child:
        groups = {pid: os.getpgid(pid) for pid in living(tag)}
        alone = next(pid for pid, group in groups.items() if pid == group)
        script = f"{tagged.ALIVE};alive {tag} {alone};echo $P"
        done = subprocess.run(argv(shell, script), capture_output=True, check=True)
        assert done.stdout.split() == [str(alone).encode()]
        subprocess.run(argv(shell, tagged.terminate(tag, 0.0)), check=True)
        child.wait()
