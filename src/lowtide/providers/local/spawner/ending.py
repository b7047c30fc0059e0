"""Ending a command's whole process tree, from inside its process namespace."""

from __future__ import annotations

import os
import signal
import time

from .restrictions import enter
from .wire import Fds, Message, failure, send

MARKER = "LOWTIDE_PROCESS"


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
            end_tree(f"{MARKER}={message['mark']}".encode(), message["grace"])
            os._exit(0)
        os.waitpid(inside, 0)
        send(fds[0], {"ok": True})
    except BaseException as error:
        failure(fds[0], error)
    finally:
        os._exit(0)


def end_tree(mark: bytes, grace: float) -> None:
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


def marked(mark: bytes, known: set[tuple[int, bytes]]) -> set[tuple[int, bytes]]:
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
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                if mark in file.read(1 << 21).split(b"\0"):
                    found.add(pid)
        except OSError:
            continue
    grown = True
    while grown:
        grown = False
        for pid, (parent, _) in living.items():
            if pid not in found and parent in found:
                found.add(pid)
                grown = True
    return {(pid, living[pid][1]) for pid in found}
