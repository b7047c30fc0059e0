"""Waits until its emulator process is gone, however it went, and ends what is left of it.

Started with its directory and a pipe (see `lowtide.isolated`). Until the end it is a process blocked in one
read; it imports what it needs to sweep only then.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path


def main(path: str, descriptor: str) -> None:
    directory, pipe = Path(path), int(descriptor)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            if not os.read(pipe, 1):
                break
        except InterruptedError:
            continue
    if not directory.exists():
        return  # a clean end
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if directory.exists():
        from lowtide.emulators.state import sweep

        sweep(directory)
