"""Reaping lowtide's processes that have outlived their parent, where no init does.

Local sandboxes, the proxy of an allow-list, the guardian and its workers are started detached: their parent leaves, and
the first process of the pid namespace becomes it. That is an init on most machines. In a container without one it is the
program itself, which does not know them, so each would stay as a zombie. The guardian adopts what it has started.

The spawner of local sandboxes must not be their parent: they would end with it, see bwrap's ``--die-with-parent``.

Only processes that were announced here are reaped: the program's own children are its own to wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from lowtide import threads

LOOK_SECONDS = 1.0
_SET_CHILD_SUBREAPER = 36

_marks: set[tuple[int, int]] = set()  # pid and start time, which a later process of that number does not have
_sessions: set[int] = set()
_adopts_all = False
_looking = False


def expect(pid: int, start_time: int) -> None:
    """This process will end some time, and is no child of the one that has started it."""
    if _is_parent():
        _marks.add((pid, start_time))
        _look()


def expect_from(launcher: int) -> None:
    """The same for what a launcher leaves, which has begun a session. The launcher itself is waited for by its caller."""
    if _is_parent():
        _sessions.add(launcher)
        _look()


def adopt() -> None:
    """Become the parent of every process below this one that outlives its own."""
    global _adopts_all
    with contextlib.suppress(OSError, AttributeError):
        _adopts_all = ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _is_parent() -> bool:
    return _adopts_all or os.getpid() == 1


def _look() -> None:
    global _looking
    if _looking:
        return
    _looking = True
    with contextlib.suppress(
        RuntimeError
    ):  # the interpreter is shutting down, and with process 1 everything ends
        threads.start(_reap_for_ever)


def _reap_for_ever() -> None:
    while True:
        threads.Event().block(LOOK_SECONDS)
        for pid, session, start_time in _zombies():
            if (pid, start_time) in _marks or (session in _sessions and pid != session):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                _marks.discard((pid, start_time))
                _sessions.discard(session)


def _zombies() -> list[tuple[int, int, int]]:
    """The children of this process that have ended, as (pid, session, start time)."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            for pid in _read(f"/proc/self/task/{thread}/children").split():
                state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
                if state[:1] == ["Z"]:
                    found.append((int(pid), int(state[3]), int(state[19])))
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
    _marks.clear()
    _sessions.clear()
    _adopts_all = _looking = False


os.register_at_fork(after_in_child=_forget)
