"""Waits until its emulator process is gone, however it went, and ends what is left of it.

Run as ``python -m lowtide.emulators.reaper DIRECTORY FD``. Until the end it is a process blocked in one
read; it imports what it needs to sweep only then.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path


def main(directory: Path, pipe: int) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
