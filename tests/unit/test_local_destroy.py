"""Ending a local sandbox is confirmed: what could not be looked at is not taken for dead."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.errors import SandboxUnavailableError
from lowtide.machine import home
from lowtide.providers.base import SandboxState
from lowtide.providers.local import destroy
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing more, whatever its other threads close meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_short_of_descriptors_an_end_fails_and_takes_nothing_away() -> None:
    with Sandbox.run(provider="local") as sandbox:
        local = home() / "local"
        directory = SandboxDirectory(local / "sandboxes" / str(sandbox.sandbox_id))
        outer, inner = directory.processes()
        assert outer is not None
        assert inner is not None
        with no_descriptor_left(), pytest.raises(SandboxUnavailableError, match="cannot be told now"):
            destroy.destroy(directory, local / "trash", 0.0)
        assert directory.exists()
        assert inner.alive()
        assert sandbox.exec(["echo", "still here"]).result(60).stdout == "still here\n"
    assert not directory.exists()
    assert not inner.alive()
    assert not outer.alive()


def test_short_of_descriptors_no_process_looks_dead() -> None:
    with Sandbox.run(provider="local") as sandbox:
        directory = SandboxDirectory(home() / "local" / "sandboxes" / str(sandbox.sandbox_id))
        outer, _ = directory.processes()
        assert outer is not None
        with no_descriptor_left():
            for look in (outer.alive, outer.open, directory.processes):
                with pytest.raises(SandboxUnavailableError):
                    look()


def test_a_sandbox_whose_outer_process_was_killed_has_not_ended_before_all_in_it(
    sleeper: subprocess.Popen[bytes],
) -> None:
    """An alarm ends the outer one when its lifetime is over; on a busy machine the others still run a while."""
    with Sandbox.run(provider="local") as sandbox:
        directory = SandboxDirectory(home() / "local" / "sandboxes" / str(sandbox.sandbox_id))
        outer, inner = directory.processes()
        assert outer is not None
        os.kill(outer.pid, signal.SIGKILL)
        # In the inner one's stead one that takes as long to die as this test wants.
        start = destroy.start_time(sleeper.pid)
        (directory.path / "pid").write_text(f"{outer.pid} {outer.start_time}\n{sleeper.pid} {start}\n")
        while outer.left():
            time.sleep(0.01)
        info = directory.info()
        assert info is not None
        assert info.state is SandboxState.RUNNING
        sleeper.kill()
        sleeper.wait()
        info = directory.info()
        assert info is not None
        assert info.state is SandboxState.FAILED
        assert inner is not None
        (directory.path / "pid").write_text(
            f"{outer.pid} {outer.start_time}\n{inner.pid} {inner.start_time}\n"
        )


def test_a_number_that_is_another_process_by_now_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    with Sandbox.run("sleep", "1000", provider="local") as sandbox:
        _, inner = SandboxDirectory(home() / "local" / "sandboxes" / str(sandbox.sandbox_id)).processes()
        assert inner is not None
        while len(own := [pid for pid in destroy.members(inner.pid) if pid != inner.pid]) != 1:
            time.sleep(0.01)  # what starts its command is still there
        destroy.send(inner, [sleeper.pid, *own], signal.SIGSTOP)
        while destroy.state(own[0]) != "T":
            time.sleep(0.01)
        assert destroy.state(sleeper.pid) in ("S", "R")


def test_this_machine_is_never_taken_for_a_sandbox() -> None:
    me = ProcessMark(os.getpid(), destroy.start_time(os.getpid()) or 0)
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert destroy.members(me.pid) == []
        destroy.send(me, [other.pid], signal.SIGTERM)
        other.kill()
        assert other.wait() == -signal.SIGKILL
