"""Ending a command's whole process tree, from inside its process namespace."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time

from .restrictions import enter
from .wire import Fds, Message, failure, send

MARKER = "LOWTIDE_PROCESS"
LOCKS = 10  # RLIMIT_LOCKS: nothing has looked at it for twenty years, and every descendant inherits it


def tag(mark: str) -> int:
    """The same mark as a number for the unused limit, which an emptied environment does not lose."""
    return int(mark, 16) >> 2


def wear(mark: str) -> None:
    """Put the mark on this process, for what it starts or becomes next."""
    with contextlib.suppress(OSError, ValueError):  # its hard limit is lower: then the environment has to do
        resource.setrlimit(LOCKS, (tag(mark), resource.getrlimit(LOCKS)[1]))


def terminate_tree(message: Message, fds: Fds) -> int:
    """Fork one that goes into the process namespace and ends what carries the mark, and its children.

    It keeps the capabilities of the sandbox's own user namespace, because a process may have made
    itself unreadable; it runs nothing of the sandbox.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        enter(fds[1], [], message["flags"])
        inside = os.fork()
        if inside == 0:
            end_tree(message["mark"], message["grace"])
            os._exit(0)
        os.waitpid(inside, 0)
        send(fds[0], {"ok": True})
    except BaseException as error:
        failure(fds[0], error)
    finally:
        os._exit(0)


def end_tree(mark: str, grace: float) -> None:
    deadline = time.monotonic() + grace
    known: set[tuple[int, bytes]] = set()
    told: set[tuple[int, bytes]] = set()
    last = time.monotonic() + grace + 30
    while time.monotonic() < last:
        known = marked(mark, known)
        if not known:
            return
        late = time.monotonic() >= deadline
        for process in known:
            if late or process not in told:
                told.add(process)
                try:
                    os.kill(process[0], signal.SIGKILL if late else signal.SIGTERM)
                    if not late:
                        os.kill(process[0], signal.SIGCONT)
                except ProcessLookupError:
                    pass
        time.sleep(0.005 if late else 0.01)


def marked(mark: str, known: set[tuple[int, bytes]]) -> set[tuple[int, bytes]]:
    """Live processes that carry the mark or descend from one that does or did."""
    own = str(os.getpid())
    living: dict[int, tuple[int, bytes]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == own:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                fields = file.read(4096).rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in b"ZX":
            living[int(name)] = (int(fields[1]), fields[19])
    found = {pid for pid, (_, start) in living.items() if (pid, start) in known}
    for pid in living:
        if pid in found or pid == 1:
            continue
        if wears(pid, mark):
            found.add(pid)
    grown = True
    while grown:
        grown = False
        for pid, (parent, _) in living.items():
            if pid not in found and parent in found:
                found.add(pid)
                grown = True
    return {(pid, living[pid][1]) for pid in found}


def wears(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
            for line in file.read(8192).splitlines():
                if line.startswith(b"Max file locks") and line.split()[3] == b"%d" % tag(mark):
                    return True
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return f"{MARKER}={mark}".encode() in file.read(1 << 21).split(b"\0")
    except OSError:
        return False
