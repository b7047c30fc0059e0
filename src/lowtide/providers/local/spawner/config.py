"""What does not change while a spawner lives."""

from __future__ import annotations

import ctypes


class Config:
    """What does not change while this spawner lives. Comes with the first message."""

    base: int | None = None  # first id of the range the sandboxes run as; None: this user
    count: int = 65536
    own_ranges: bool = False  # every sandbox runs as ids of its own, and sees the range above mapped to them
    trees: tuple[
        tuple[str, str, str], ...
    ] = ()  # the host's trees: where from, where to, which ids are mapped
    descriptors: int = 1024  # the most that a process in a sandbox may have open
    own_pid_namespace: int = -1
    bound: tuple[tuple[str, str], ...] = ()  # the groups around all that it starts, and where it came from
    home: str = ""  # the state directory, for an ordinary user
    sandboxes: str = ""  # the directory that they are all in
    free: tuple[int | None, int | None] = (None, None)  # bytes and inodes that they leave on the disk
    point: str = ""  # where trees are staged
    seccomp: bytes = b""
    elf_fd: int = -1
    seccomp_fd: int = -1
    program: ctypes.Array[ctypes.c_char] | None = None


config = Config()
