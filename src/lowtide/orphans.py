"""Reaping the processes of lowtide's that have outlived their parent, where nobody else does.

The guardian, its workers and the proxy of an allow-list are started detached: their parent leaves, and the first process
of the pid namespace becomes it. That is an init on most machines. In a container without one it is the program itself,
which does not know them, so each would stay as a zombie. The guardian adopts what it has started detached.

Only processes that were announced here are reaped: the program's own children are its own to wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from lowtide import threads

LOOK_SECONDS = 1.0
_SET_CHILD_SUBREAPER = 36

_pids: set[int] = set()
_sessions: set[int] = set()
_adopts_all = False
_looking = False


def expect(pid: int) -> None:
    """This process will end some time, and is no child of the one that has started it."""
    _pids.add(pid)
    _look()


def expect_from(launcher: int) -> None:
    """The same for what a launcher leaves, which has begun a session. The launcher itself is waited for by its caller."""
    _sessions.add(launcher)
    _look()


def adopt() -> None:
    """Become the parent of every process below this one that outlives its own."""
    global _adopts_all
    with contextlib.suppress(OSError, AttributeError):
        _adopts_all = ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _look() -> None:
    global _looking
    if _looking or not (_adopts_all or os.getpid() == 1):
        return
    _looking = True
    with contextlib.suppress(
        RuntimeError
    ):  # the interpreter is shutting down, and with process 1 everything ends
        threads.start(_reap_for_ever)


def _reap_for_ever() -> None:
    while True:
        threads.Event().block(LOOK_SECONDS)
        for pid, session in _zombies():
            if pid in _pids or (session in _sessions and pid != session):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                _pids.discard(pid)


def _zombies() -> list[tuple[int, int]]:
    """The children of this process that have ended, as (pid, session)."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            for pid in _read(f"/proc/self/task/{thread}/children").split():
                state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
                if state[:1] == ["Z"]:
                    found.append((int(pid), int(state[3])))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _forget() -> None:
    """In a forked child, which has no children and adopts none."""
    global _adopts_all, _looking
    _pids.clear()
    _sessions.clear()
    _adopts_all = _looking = False


os.register_at_fork(after_in_child=_forget)
