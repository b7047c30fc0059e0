"""A range of ids for each sandbox, as root: what the kernel counts for a user is then one sandbox's alone.

On the disk everything stays owned by one range (`config.base`), which never changes: layers, images and snapshots
need no chown, and a range that is used again owns no file. A sandbox sees its layers through mounts that map the
range on the disk to its own. A range is taken by locking its byte in one file of this machine; process 1 of the
sandbox holds that lock, so the kernel gives it back however the sandbox ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

LOCKS = ("/run/lowtide", "/var/run/lowtide", "/tmp/.lowtide-ids")  # noqa: S108 - made for root alone, and checked
# Above what systemd gives to containers, below what the C library's signed numbers cannot hold; then the rest.
FIRST, MANY, MOST = 0x7000_0000, 0x0FFF, 0x7E00
F_OFD_SETLK = 37
TRIES = 64


def take(count: int) -> tuple[int, int]:
    """The first id of a range that no other sandbox has, and the descriptor that holds it.

    -1: nothing could be locked. A range drawn at random is then another's once in thousands of times.
    """
    file = -1
    with contextlib.suppress(OSError):
        file = open_locks()
    for attempt in range(TRIES):
        number = int.from_bytes(os.urandom(4), "little") % (MANY if attempt < TRIES // 2 else MOST)
        if file < 0 or lock(file, number):
            return FIRST + number * count, file
    os.close(file)
    raise OSError(errno.EAGAIN, "no range of ids is free: too many sandboxes run on this machine")


def lock(file: int, number: int) -> bool:
    """Of the open file, not of the process: it outlives this program in every process that inherits the descriptor."""
    try:
        fcntl.fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def open_locks() -> int:
    for directory in LOCKS:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            found = os.lstat(directory)
            if found.st_uid != 0 or found.st_mode & 0o170022 != 0o040000:
                continue  # another user's, or writable for others
            return os.open(f"{directory}/ids", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
    raise OSError(errno.ENOENT, "no place for the locks of id ranges")
