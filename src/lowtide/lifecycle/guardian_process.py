"""The guardian as a process: one per state directory, its log, its descriptors, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from io import TextIOWrapper
from pathlib import Path

from lowtide import machine, orphans
from lowtide.errors import LowtideError
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.guardian import Guardian
from lowtide.lifecycle.guardian_link import LOG, lock_name, socket_name

log = logging.getLogger("lowtide.guardian")

LOG_BYTES = 1_000_000
"""The log starts anew past this, keeping one old file."""
TURN_SECONDS = 30.0
"""How long a new guardian waits for one that has closed its way in and holds the lock."""


def main(path: str) -> None:
    """Run as the guardian of that state directory, unless there is one already."""
    point("guardian:started")
    os.chdir("/")
    orphans.adopt()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["LOWTIDE_HOME"] = path
    lock = _Lock(Path(path))
    if not lock.wait():
        return
    point("guardian:locked")
    log_to(Path(path) / LOG)
    machine.hold_boot(Path(path))
    descriptors = _raise_descriptor_limit()
    try:
        guardian = Guardian(Path(path), descriptors=descriptors, leaves=lock.free, lock=lock.take)
        asyncio.run(guardian.run())
    except FileNotFoundError as error:  # the whole state directory was removed under us
        log.warning("guardian leaves: %s", error)
    except LowtideError as error:
        log.warning("guardian leaves: %s", error)
        sys.exit(1)
    except Exception:
        log.exception("guardian failed")
        sys.exit(1)


class _Lock:
    """The lock that makes a process the guardian of a state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def wait(self) -> bool:
        """Whether this is the guardian from now on.

        If another process has the lock and a socket, that one is the guardian. If it has the lock and no socket, it is
        starting, or leaving and no longer watching. Our owner may die before it is gone, so this waits for its end.
        """
        deadline = time.monotonic() + TURN_SECONDS
        fd = self._open()
        while not _taken(fd):
            if (self._path / socket_name()).exists() or time.monotonic() > deadline:
                os.close(fd)
                return False
            time.sleep(0.05)
        self._fd = fd
        return True

    def take(self) -> bool:
        """Take the lock if it is free. If the state directory was made again, take the lock in the new one."""
        if self._fd is not None and self._is_in_place(self._fd):
            return True
        fd = self._open()
        if not _taken(fd):
            os.close(fd)
            return False
        self.free()
        self._fd = fd
        return True

    def _is_in_place(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path / lock_name()))
        except OSError:
            return False

    def _open(self) -> int:
        return os.open(self._path / lock_name(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def free(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def log_to(path: Path) -> None:
    """One line per decision."""
    handler = BoundedLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    root = logging.getLogger("lowtide")
    root.addHandler(handler)
    root.setLevel(logging.INFO)


class BoundedLog(logging.FileHandler):
    """A log for its owner's eyes, shared with the guardians of other containers, that starts anew when long."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)
        self._old = path.with_name(path.name + ".1")

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        return open(fd, "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep it from its work
            self._start_anew_if_due()
            super().emit(record)

    def _start_anew_if_due(self) -> None:
        if self.stream is None:
            return
        mine = os.fstat(self.stream.fileno())
        if mine.st_size > LOG_BYTES:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.baseFilename), mine):  # else another guardian was first
                    os.replace(self.baseFilename, self._old)
        elif mine.st_nlink:
            return
        self.stream.close()
        self.stream = None


def _raise_descriptor_limit() -> int:
    """As many descriptors as this user may have; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard if hard != resource.RLIM_INFINITY else 1 << 20
    return soft
