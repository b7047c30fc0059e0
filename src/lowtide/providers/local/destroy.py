"""Ending a sandbox: kill everything in it, remove its cgroups and its directory, and be sure of it.

Needs no spawner, so that any process of the same user (a guardian, a sweep) can do it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from lowtide import threads
from lowtide.errors import SandboxUnavailableError
from lowtide.providers.local import bound_groups, cgroups, freezer
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory, start_time
from lowtide.providers.local.wait_readable import readable
from lowtide.trees.remove import remove_tree

_PATIENCE_SECONDS = 20.0


def destroy(directory: SandboxDirectory, trash: Path, grace_seconds: float) -> bool:
    """True: ended now. False: there was none. Raises SandboxUnavailableError when it could not be confirmed."""
    if not directory.exists():
        return False
    spec = directory.spec() or {}
    killed = stop(directory, grace_seconds)
    return _put_away(directory, trash, killed, spec.get("cgroups", []))


async def destroy_on_loop(directory: SandboxDirectory, trash: Path, grace_seconds: float) -> bool:
    """The same for a running loop: in a thread only where something inside has to be asked to end first."""
    if not directory.exists():
        return False
    spec = directory.spec() or {}
    outer, inner = directory.processes()
    asking = grace_seconds > 0 and inner is not None and (spec.get("command") or not _idle(inner.pid))
    if asking or inner is None or spec.get("cgroups"):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, destroy, directory, trash, grace_seconds)
    freezer.thaw(directory, only_version_1=True)
    fds = _send_kill(outer, inner)
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            for fd in fds:
                await readable(fd)
    except TimeoutError:
        raise _not_ended(directory.sandbox_id) from None
    finally:
        for fd in fds:
            os.close(fd)
    return _put_away(directory, trash, (outer, inner), [])


def _put_away(
    directory: SandboxDirectory,
    trash: Path,
    killed: tuple[ProcessMark | None, ProcessMark | None],
    groups: list[str],
) -> bool:
    gone = trash / f"{directory.sandbox_id}.{os.urandom(4).hex()}"
    try:
        trash.mkdir(mode=0o700, exist_ok=True)
        os.rename(directory.path, gone)
    except FileNotFoundError:
        return False  # somebody else ended it at the same time
    settle(gone, directory.sandbox_id, killed, groups)
    _remover.remove(gone)
    return True


def stop(directory: SandboxDirectory, grace_seconds: float) -> tuple[ProcessMark | None, ProcessMark | None]:
    """End its processes and leave its files."""
    outer, inner = directory.processes()
    asking = grace_seconds > 0 and inner is not None and inner.alive()
    freezer.thaw(directory, only_version_1=not asking)
    if asking and inner is not None:
        _ask_to_end(inner, grace_seconds, only_main=bool((directory.spec() or {}).get("command")))
    kill(outer, inner, directory.sandbox_id)
    return outer, inner


def settle(
    gone: Path, sandbox_id: str, killed: tuple[ProcessMark | None, ProcessMark | None], groups: list[str]
) -> None:
    """Make sure that nothing runs in a directory that is no sandbox any more.

    A create that was still under way may have written its process down just before the directory was
    taken from it: look again, now that no later one can.
    """
    later = SandboxDirectory(gone)
    deadline = time.monotonic() + 2.0
    while (marks := later.processes())[0] is None and (gone / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    if marks != killed:
        freezer.thaw(later, only_version_1=True)
        kill(*marks, sandbox_id)
    _kill_and_wait([later.proxy()], sandbox_id)
    spec = later.spec() or {}
    freezer.remove(later)
    cgroups.remove(groups or spec.get("cgroups", []))
    bound_groups.release(spec.get("bound", []))


def sweep_trash(trash: Path) -> None:
    """Finish what a process that died in the middle of a destroy has left."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(trash):
            with contextlib.suppress(OSError, SandboxUnavailableError):
                settle(trash / name, name, (None, None), [])
                _remover.remove(trash / name)


class _Remover:
    """Threads that delete what destroyed sandboxes have written.

    Deleting is the slow part of an end (a disk that discards takes a millisecond for every block) and
    nobody has to wait for it: the sandbox is dead and its name is free. It begins a moment later, several
    at a time, because a thread that makes many small calls takes the interpreter from the others each
    time. At the interpreter's end, when no thread can be started any more, whoever waits for it does the
    rest; what a killed process leaves is swept by the next one.
    """

    _most = 4
    _moment_seconds = 0.2

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: the threads stayed with the parent."""
        self._lock = threads.Lock()
        self._waiting: list[Path] = []
        self._threads: list[threads.Event] = []  # each is set when its thread has ended
        self._hurry = threads.Event()

    def remove(self, path: Path) -> None:
        with self._lock:
            self._waiting.append(path)
            if len(self._threads) < min(self._most, 1 + len(self._waiting) // 16):
                ended = threads.Event()
                with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                    threads.start(lambda: self._work(ended))
                    self._threads.append(ended)

    def _work(self, ended: threads.Event) -> None:
        self._hurry.wait(self._moment_seconds)
        while self._remove_one(ended):
            pass
        ended.set()

    def _remove_one(self, ended: threads.Event | None = None) -> bool:
        with self._lock:
            if not self._waiting:
                if ended is not None:
                    self._threads.remove(ended)
                return False
            path = self._waiting.pop()
        with contextlib.suppress(OSError):  # stays in the trash and is tried again by the next process
            remove_tree(path)
        return True

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._hurry.set()
        for ended in list(self._threads):
            ended.wait(max(0.0, deadline - time.monotonic()))
        while time.monotonic() < deadline and self._remove_one():
            pass
        self._hurry = threads.Event()


_remover = _Remover()
atexit.register(_remover.wait, 30.0)
os.register_at_fork(after_in_child=_remover.forget)


def wait_removed(seconds: float = 30.0) -> None:
    """Until the files of what was destroyed here are deleted too."""
    _remover.wait(seconds)


def kill(outer: ProcessMark | None, inner: ProcessMark | None, sandbox_id: str) -> None:
    """SIGKILL both, wait until both are gone. With the inner one, process 1 of its namespace, everything dies."""
    unknown = inner is None and outer is not None
    if inner is None and outer is not None:
        inner = _child_of(outer)
    _kill_and_wait([outer, inner], sandbox_id)
    if unknown and outer is not None:
        _kill_and_wait(_left_of(outer), sandbox_id)


def _kill_and_wait(marks: Sequence[ProcessMark | None], sandbox_id: str) -> None:
    fds = _send_kill(*marks)
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for fd in fds:
            poll = threads.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _not_ended(sandbox_id)
    finally:
        for fd in fds:
            os.close(fd)


def _send_kill(*marks: ProcessMark | None) -> list[int]:
    """SIGKILL to those that live; descriptors that become readable when they have ended."""
    fds: list[int] = []
    try:
        for mark in marks:
            if mark is not None and (fd := mark.open()) is not None:
                fds.append(fd)
        for fd in fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _not_ended(sandbox_id: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        "its processes do not end although they were killed", provider="local", sandbox_id=sandbox_id
    )


def _child_of(outer: ProcessMark) -> ProcessMark | None:
    """The outer bwrap's only child, for the moment before it was written down.

    The outer one is stopped first: killed between making its child and writing it down, it would leave
    a child behind that waits for it for ever and that nobody knows of.
    """
    fd = outer.open()
    if fd is None:
        return None
    try:
        signal.pidfd_send_signal(fd, signal.SIGSTOP)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    deadline = time.monotonic() + 1.0
    while state(outer.pid) not in ("T", "Z", "X", "") and time.monotonic() < deadline:
        time.sleep(0.0005)
    for child in _children(outer.pid):
        start = start_time(child)
        if start is not None and outer.alive():
            return ProcessMark(child, start)
    return None


def _left_of(outer: ProcessMark) -> list[ProcessMark]:
    """What is left of the outer bwrap's session, which nothing else is in.

    Whatever killed the outer one while its child waited for it: that child never learns of it.
    """
    if start_time(outer.pid) not in (None, outer.start_time):
        return []  # the number belongs to somebody else by now, and so would the session
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if name.isdigit() and int(name) != outer.pid:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if int(fields[3]) == outer.pid and fields[0] not in (b"Z", b"X"):
                    found.append(ProcessMark(int(name), int(fields[19])))
    return found


def state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def main_process(inner: int) -> int | None:
    """The main command: number 2 in the sandbox, a child of its process 1."""
    for child in _children(inner):
        with contextlib.suppress(OSError), open(f"/proc/{child}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    if line.split()[-1] == b"2":
                        return child
                    break
    return None


def _ask_to_end(inner: ProcessMark, grace_seconds: float, *, only_main: bool) -> None:
    if not only_main and _idle(inner.pid):
        return
    deadline = time.monotonic() + grace_seconds
    main = main_process(inner.pid) if only_main else None
    told: set[int] = set()
    while True:
        if only_main:
            waiting = [main] if main is not None and start_time(main) is not None else []
        else:
            waiting = [pid for pid in members(inner.pid) if pid != inner.pid]
        if not waiting or time.monotonic() >= deadline:
            return
        send(inner, [pid for pid in waiting if pid not in told], signal.SIGTERM, signal.SIGCONT)
        told.update(waiting)
        time.sleep(0.005)


def _idle(inner: int) -> bool:
    """Whether its own /proc shows nothing but process 1. No is also: it cannot be read."""
    try:
        names = os.listdir(f"/proc/{inner}/root/proc")
    except OSError:
        return False
    return {name for name in names if name.isdigit()} == {"1"}


def send(inner: ProcessMark, pids: Sequence[int], *numbers: int) -> None:
    """To those that still are the sandbox's: a number may be another's by now, and that other one this machine's."""
    namespace = _namespace(inner.pid) if inner.alive() else None
    if namespace is None:
        return
    for pid in pids:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if in_sandbox(inner, pid, namespace):
                    for number in numbers:
                        signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)


def in_sandbox(inner: ProcessMark, pid: int, namespace: int | None = None) -> bool:
    """Whether this process is one of the sandbox whose process 1 is `inner`."""
    if namespace is None:
        namespace = _namespace(inner.pid) if inner.alive() else None
    if namespace is None:
        return False
    # A program that may not be read shows its namespaces to nobody, and its parent to all.
    return _namespace(pid) == namespace or ProcessMark.child_of(inner, pid) is not None


def _namespace(pid: int) -> int | None:
    """A process namespace by its number. None: it is gone, or is our own, which is no sandbox's."""
    try:
        number = os.stat(f"/proc/{pid}/ns/pid").st_ino
        return number if number != os.stat("/proc/self/ns/pid").st_ino else None
    except OSError:
        return None


def members(inner: int) -> list[int]:
    """The live processes of the same process namespace."""
    namespace = _namespace(inner)
    if namespace is None:
        return []
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}/ns/pid").st_ino == namespace and start_time(int(name)) is not None:
                    found.append(int(name))
    return found
