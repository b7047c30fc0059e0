"""What runs inside the sandbox: a watch of a directory by inotify. Its text goes before that of `inside`."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any

EVENT = struct.Struct("iIII")
IN_MODIFY, IN_ATTRIB, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_IGNORED, IN_ISDIR, IN_Q_OVERFLOW = 0x400, 0x800, 0x8000, 0x40000000, 0x4000
WATCHED = IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF
KINDS = (
    (IN_CREATE | IN_MOVED_TO, "CREATE"),
    (IN_MOVED_FROM, "RENAME"),
    (IN_ATTRIB, "CHMOD"),
    (IN_MODIFY, "WRITE"),
    (IN_DELETE, "REMOVE"),
)

libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    def __init__(self, root: str, recursive: bool, entry: Callable[[str], dict[str, Any]] | None) -> None:
        self.root = root
        self.recursive = recursive
        self.entry = entry
        self.fd: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.paths: dict[int, str] = {}
        self.events: list[dict[str, Any]] = []
        self.add(root, False)

    def add(self, path: str, report: bool) -> None:
        number = libc.inotify_add_watch(self.fd, os.fsencode(path), WATCHED)
        if number < 0:
            code = ctypes.get_errno()
            if path == self.root:
                raise OSError(code, os.strerror(code), path)
            return
        self.paths[number] = path
        if not self.recursive:
            return
        try:
            names = sorted(os.listdir(path))
        except OSError:
            return
        for name in names:
            below = os.path.join(path, name)
            if report:  # it came before the watch did
                self.note("CREATE", below)
            if os.path.isdir(below) and not os.path.islink(below):
                self.add(below, report)

    def note(self, kind: str, path: str) -> None:
        event: dict[str, Any] = {"name": os.path.relpath(path, self.root), "type": kind}
        if self.entry is not None and kind in ("CREATE", "WRITE", "CHMOD"):
            with contextlib.suppress(OSError):
                event["entry"] = self.entry(path)
        self.events.append(event)

    def drain(self) -> list[dict[str, Any]]:
        while True:
            try:
                data = os.read(self.fd, 65536)
            except (BlockingIOError, OSError):
                break
            at = 0
            while at < len(data):
                number, mask, _, length = EVENT.unpack_from(data, at)
                at += EVENT.size
                name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
                at += length
                self.take(number, mask, name)
        events, self.events = self.events, []
        return events

    def take(self, number: int, mask: int, name: str) -> None:
        if mask & IN_IGNORED:
            self.paths.pop(number, None)
            return
        directory = self.paths.get(number)
        if directory is None:
            return
        if not name:
            if mask & IN_DELETE_SELF and directory == self.root:
                self.note("REMOVE", directory)
            return
        path = os.path.join(directory, name)
        for bits, kind in KINDS:
            if mask & bits:
                self.note(kind, path)
        if self.recursive and mask & IN_ISDIR and mask & (IN_CREATE | IN_MOVED_TO):
            self.add(path, True)
