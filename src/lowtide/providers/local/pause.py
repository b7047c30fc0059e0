"""Pausing a sandbox: every process in it stopped, and continued again.

By the kernel's freezer. Where this user may make no control group, by signals: then a timer inside that sends SIGCONT
wakes its process while the sandbox is paused, and `pause` warns of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from lowtide import threads
from lowtide.errors import LowtideError, SandboxUnavailableError
from lowtide.providers.local import cgroups, freezer, stop_all
from lowtide.providers.local.destroy import in_sandbox, members, send, state
from lowtide.providers.local.freezer import Freezer
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory

_PATIENCE_SECONDS = 10.0
_MOMENT_SECONDS = 0.25
_LOOKS = 2  # in a row that find everything held: numbers of processes can begin anew during one
_ENDED = ("Z", "X", "")
_STOPPED = ("T", "t", *_ENDED)
_ASLEEP = (*_STOPPED, "D")
"""With the signal waiting for it, one in an uninterruptible sleep runs no more either. A parent sleeps so
until its new child has begun its program (vfork), which a child that was stopped first never does."""


def pause(directory: SandboxDirectory, inner: ProcessMark) -> None:
    """Returns when nothing in it runs."""
    group = freezer.make(directory, inner.pid)
    if isinstance(group, Freezer):
        try:
            directory.set_paused(True, frozen=True)
            _freeze(directory, inner, group)
            return
        except FileNotFoundError:  # destroyed meanwhile
            group.thaw()
            cgroups.remove([group.path])
            raise
        except OSError as error:
            group.thaw()
            if isinstance(error, LowtideError):
                raise
            why = f"{group.path}: {error.strerror}"  # the processes are another's to move
    else:
        why = group
    _stop(directory, inner)
    warnings.warn(
        f"the sandbox {directory.sandbox_id} is paused by SIGSTOP, because this user may use no freezer "
        f"({why}). A process in it that has set a timer which sends SIGCONT runs on when the timer fires: "
        "stop() what must not run. Run as root, or in a delegated control group (`systemd-run --user --scope -p "
        "Delegate=yes`), to pause by the freezer",
        stacklevel=2,
    )


def _freeze(directory: SandboxDirectory, inner: ProcessMark, group: Freezer) -> None:
    """Processes in the frozen group cannot fork, so looking again finds those that were missed.

    Processes that fork and end faster than they are moved are stopped first, all at once.
    """
    began, looks = time.monotonic(), 0
    while True:
        outside = [pid for pid in _own(inner) if not _held(group, pid)]
        for pid in outside:
            _move(inner, group, pid)
        waited = time.monotonic() - began
        looks = looks + 1 if not outside and all(_tasks(inner, group.holds_path)) else 0
        if looks >= _LOOKS and (
            group.frozen() or (waited > _MOMENT_SECONDS and all(_state(pid) != "R" for pid in _own(inner)))
        ):
            return
        if waited > _PATIENCE_SECONDS:
            resume(directory, inner)
            raise _does_not_stop(directory)
        if waited > _MOMENT_SECONDS and not looks:
            directory.set_paused(True)  # not by the freezer alone: resume() has to send SIGCONT
            _stop_at_once(inner)
        time.sleep(0.002)


def _tasks(inner: ProcessMark, is_held: Callable[[str], bool]) -> Iterator[bool]:
    """For each process in the sandbox's own /proc but process 1: whether it is held. What ended meanwhile is not:
    it may have been one of a chain, in which each process forks the next one and ends.

    Numbers in there grow, so the last one of a chain is always among them.
    """
    processes = f"/proc/{inner.pid}/root/proc"
    for name in os.listdir(processes):
        if name.isdigit() and name != "1":
            try:
                for thread in os.listdir(f"{processes}/{name}/task"):
                    path = f"{processes}/{name}/task/{thread}"
                    yield _letter(path) in _ENDED or is_held(path)
            except (FileNotFoundError, ProcessLookupError, IndexError):
                yield False


def _stop_at_once(inner: ProcessMark) -> None:
    """SIGSTOP for every process of the sandbox in one instant, which no fork gets past."""
    python = getattr(sys, "_base_executable", None) or sys.executable
    with contextlib.suppress(subprocess.TimeoutExpired):  # then the next look tells
        threads.run_process(
            [python, "-I", "-S", stop_all.__file__, str(inner.pid), str(inner.start_time)],
            env={},
            cwd="/",
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )


def _held(group: Freezer, pid: int) -> bool:
    """Ended ones count as held. Where the first thread has left, the others say which group the process is in."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in (pid, *(int(name) for name in os.listdir(f"/proc/{pid}/task"))):
            if state(thread) not in _ENDED:
                return group.holds(pid, thread)
    return True


def _move(inner: ProcessMark, group: Freezer, pid: int) -> None:
    """A process is moved by its number. If it ends meanwhile, the number can be this machine's: let that one go on."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if not in_sandbox(inner, pid):
                return
            group.add(pid)
            try:
                signal.pidfd_send_signal(pidfd, 0)
            except ProcessLookupError:
                if not in_sandbox(inner, pid):
                    group.let_out(pid)
        finally:
            os.close(pidfd)


def _stop(directory: SandboxDirectory, inner: ProcessMark) -> None:
    """By signals. What is stopped cannot fork, so looking again finds what was missed."""
    directory.set_paused(True)
    began, looks = time.monotonic(), 0
    while looks < _LOOKS:
        running = [pid for pid in _own(inner) if _state(pid) not in _STOPPED]
        waited = time.monotonic() - began
        stopped = not running and all(_tasks(inner, _is_stopped))
        asleep = waited > _MOMENT_SECONDS and all(_tasks(inner, _is_asleep))
        looks = looks + 1 if stopped or asleep else 0
        if waited > _MOMENT_SECONDS and not looks:
            _stop_at_once(inner)
        if waited > _PATIENCE_SECONDS:
            resume(directory, inner)
            raise _does_not_stop(directory)
        send(inner, running, signal.SIGSTOP)
        time.sleep(0.002)


def _is_stopped(task: str) -> bool:
    return _letter(task) in _STOPPED


def _is_asleep(task: str) -> bool:
    return _letter(task) in _ASLEEP


def _letter(task: str) -> str:
    with open(f"{task}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0].decode()


def resume(directory: SandboxDirectory, inner: ProcessMark) -> None:
    frozen = directory.frozen()
    freezer.thaw(directory)
    directory.set_paused(False)
    if not frozen:
        send(inner, _own(inner), signal.SIGCONT)


def paused(sandbox_id: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        "the sandbox is paused: resume() it first", provider="local", sandbox_id=sandbox_id
    )


def _does_not_stop(directory: SandboxDirectory) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        "its processes do not stop", provider="local", sandbox_id=directory.sandbox_id, retryable=True
    )


def _own(inner: ProcessMark) -> list[int]:
    """All but process 1, which is ours and only reaps."""
    return [pid for pid in members(inner.pid) if pid != inner.pid]


def _state(pid: int) -> str:
    """Of the process; of its other threads where the first one has left, which is a zombie until they have."""
    own = state(pid)
    if own not in ("Z", "X"):
        return own
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            other = state(int(thread))
            if other not in _STOPPED:
                return other
    return own
