"""Keeping room on the disk: when it is almost full, the sandbox that holds the most is ended and its files removed.

No filesystem here can bound a directory at no cost to a create, and most cannot at all. So the spawner looks, once
a second, how much is free: one system call. Only below the bound does a child of it look at what the sandboxes hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time

from . import trees
from .config import config
from .create import identity
from .kernel import NEWUSER, check, libc, put

LOOK_SECONDS = 1.0
MEASURE_SECONDS = 5.0  # of one sandbox: what was found by then counts
# One that holds less is not why the disk is full.
SHARE, ENOUGH_BYTES, ENOUGH_INODES = 8, 256 << 20, 100_000
TREES = ("root", "usr", "work", "usrwork", "disk.img")


class FreeDisk:
    """When to look, and who is making room at the moment."""

    def __init__(self) -> None:
        self.child = 0
        self._due = 0.0

    def wait_seconds(self) -> float:
        """Until the next look; -1 for never."""
        if config.free == (None, None):
            return -1
        return max(0.0, self._due - time.monotonic())

    def look(self) -> None:
        if config.free == (None, None) or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_SECONDS
        if self.child or short() is None:
            return
        trees.load()
        self.child = os.fork()
        if self.child == 0:
            try:
                make_room()
            finally:
                os._exit(0)


def short() -> int | None:
    """What there is too little of: 0 bytes, 1 inodes; None when there is enough."""
    try:
        found = os.statvfs(config.sandboxes)
    except OSError:
        return None
    least_bytes, least_inodes = config.free
    if least_bytes is not None and found.f_bavail * found.f_frsize < least_bytes:
        return 0
    if least_inodes is not None and found.f_files and found.f_favail < least_inodes:
        return 1
    return None


def make_room() -> None:
    """In the child: end the largest, then the next, until there is room again or no sandbox is to blame."""
    which = short()
    if which is None:
        return
    least = min((config.free[which] or 0) // SHARE, (ENOUGH_BYTES, ENOUGH_INODES)[which])
    alive = [(place, marks) for place in all_places() if (marks := living(place))]
    deleted = [held_by_processes(marks)[which] for _, marks in alive]
    become_owner()
    held = [
        (measure(place)[which] + open_only, place, marks)
        for (place, marks), open_only in zip(alive, deleted, strict=True)
    ]
    for amount, place, marks in sorted(held, reverse=True):
        if short() != which or amount < max(least, 1):
            return
        end(place, marks, amount, which)


def all_places() -> list[str]:
    with contextlib.suppress(OSError):
        return [f"{config.sandboxes}/{name}" for name in os.listdir(config.sandboxes)]
    return []


def living(place: str) -> list[bytes]:
    """The processes it has written down, those that live: number and start time."""
    try:
        with open(f"{place}/pid", "rb") as file:
            lines = file.read(256).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(OSError, IndexError, ValueError):
            if identity(int(line.split()[0])) == line:
                found.append(line)
    return found


def held_by_processes(marks: list[bytes]) -> tuple[int, int]:
    """Bytes and inodes of files that have no name any more and that its processes hold open."""
    try:
        inside = os.readlink(f"/proc/{int(marks[-1].split()[0])}/ns/pid")
    except OSError:
        return 0, 0
    seen: dict[tuple[int, int], int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") != inside:
                continue
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{fd}")
                    if info.st_nlink == 0:
                        seen[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(seen.values()), len(seen)


def become_owner() -> None:
    """As an ordinary user: read also the directories that a sandbox has closed to its user."""
    if config.base is None:
        user, group = os.geteuid(), os.getegid()
        check(libc.unshare(NEWUSER), "unshare")
        put("/proc/self/setgroups", b"deny")
        put("/proc/self/uid_map", b"0 %d 1" % user)
        put("/proc/self/gid_map", b"0 %d 1" % group)


def measure(place: str) -> tuple[int, int]:
    """Bytes and inodes of its layers. What changes meanwhile is looked at again, a few times."""
    most = (0, 0)
    for _ in range(3):
        found, whole = measure_once(place)
        most = max(most, found)
        if whole:
            break
    return most


def measure_once(place: str) -> tuple[tuple[int, int], bool]:
    size, seen, deadline = 0, set(), time.monotonic() + MEASURE_SECONDS
    try:
        top = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return (0, 0), True
    try:
        for entry in trees.walk(top):
            if not entry.left and entry.info.st_ino not in seen:
                seen.add(entry.info.st_ino)
                size += entry.info.st_blocks * 512
            if time.monotonic() > deadline:
                break
    except OSError as error:
        return (size, len(seen)), error.errno != errno.ESTALE
    finally:
        os.close(top)
    return (size, len(seen)), True


def end(place: str, marks: list[bytes], amount: int, which: int) -> None:
    """Say why, kill it, and remove what it has written. Its directory stays: its owner asks there what happened."""
    what = f"{amount} {('bytes', 'files')[which]}"
    text = f"the disk was almost full, and it held the most of all local sandboxes: {what}"
    with contextlib.suppress(OSError):  # there may be no room for it yet
        say(place, text)
    for line in marks:
        kill(line)
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    for name in TREES:
        with contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=folder)
            except OSError:
                trees.remove.remove_at(folder, name)
    os.close(folder)
    say(place, text)


def say(place: str, text: str) -> None:
    put(f"{place}/ended", text.encode(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def kill(line: bytes) -> None:
    pid = int(line.split()[0])
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        if identity(pid) == line:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(10_000)
        os.close(pidfd)
