"""The machine's processes as trees, read from /proc."""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable

UP = 3
"""The processes of a raw sandbox that is up: the outer and the inner bwrap, and the command."""


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children() -> dict[int, list[int]]:
    tree: dict[int, list[int]] = defaultdict(list)
    for pid in pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                tree[int(file.read().rpartition(b")")[2].split()[1])].append(pid)
        except OSError:
            continue
    return tree


def descendants(pid: int, tree: dict[int, list[int]]) -> list[int]:
    """The process itself, then all that it started."""
    found = [pid]
    for member in found:
        found.extend(tree.get(member, ()))
    return found


def until_up(running: Iterable[subprocess.Popen[bytes]], *, within_seconds: float = 120.0) -> None:
    """Wait until each raw bwrap runs its command. One that is killed earlier leaves its inner process behind."""
    deadline = time.monotonic() + within_seconds
    while True:
        tree = children()
        if all(len(descendants(process.pid, tree)) >= UP for process in running):
            return
        if time.monotonic() > deadline:
            raise RuntimeError("the raw bubblewrap processes did not come up")
        time.sleep(0.2)


def end(running: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill each with all that it started, however far it got."""
    tree = children()
    for process in running:
        for pid in reversed(descendants(process.pid, tree)) if process.poll() is None else ():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
    for process in running:
        process.wait()
