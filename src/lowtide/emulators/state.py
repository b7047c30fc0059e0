"""Where one emulator process keeps its state, and what makes sure that it ends with the process.

Three nets, each for the case where the one before it is gone: the process ends its sandboxes itself;
a small reaper process waits on a pipe whose other end only the emulator holds, so it learns of a
kill -9 at once; and every start sweeps directories whose lock nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import threading
from pathlib import Path
from typing import Self

from lowtide import isolated


class State:
    def __init__(
        self, root: Path, directory: Path, lock: int, reaper: subprocess.Popen[bytes], alive: int
    ) -> None:
        self.root = root
        self.directory = directory
        self._lock = lock
        self._reaper = reaper
        self._alive = alive  # the pipe end whose closing tells the reaper that this process is gone
        self._closed = False

    @classmethod
    def open(cls, home: Path | None) -> Self:
        if home is None:
            from lowtide.machine import home as default_home

            home = default_home()
        root = home / "emulators"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = root / secrets.token_hex(8)
        directory.mkdir(mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        read_end, write_end = os.pipe()
        try:
            reaper = subprocess.Popen(
                isolated.command("lowtide.emulators.reaper", str(directory), str(read_end)),
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # a Ctrl+C in the terminal is not for it
            )
        finally:
            os.close(read_end)
        return cls(root, directory, lock, reaper, write_end)

    def sweep_stale_soon(self) -> None:
        """Sweep what earlier, killed emulators left, without holding up this start."""
        stale = [path for path in self.root.iterdir() if path != self.directory and path.is_dir()]
        if stale:
            threading.Thread(target=sweep_stale, args=(stale,), name="lowtide-sweep", daemon=True).start()

    def close(self, *, remove: bool) -> None:
        """Let the reaper go; `remove` the directory when every sandbox in it has been ended."""
        if self._closed:
            return
        self._closed = True
        if remove:
            remove_tree(self.directory)
        os.close(self._lock)
        os.close(self._alive)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(timeout=10)


def sweep_stale(directories: list[Path]) -> list[Path]:
    """End and remove what belongs to emulators that are no more; leave those whose lock is held."""
    swept = []
    for directory in directories:
        with contextlib.suppress(OSError):
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep(directory)
                swept.append(directory)
            finally:
                os.close(lock)
    return swept


def sweep(directory: Path) -> None:
    """End every sandbox of a dead emulator and its command, and remove its directory. The caller holds the lock."""
    import asyncio

    from lowtide.emulators.backing import destroy_all
    from lowtide.emulators.command import end_marked

    gone = asyncio.run(destroy_all(directory))
    end_marked(directory)
    if gone:
        remove_tree(directory)


def remove_tree(directory: Path) -> None:
    """Remove it even where a sandbox left directories that nobody may enter. Never follows a link."""

    def unlock_and_retry(function: object, path: str, error: object) -> None:
        with contextlib.suppress(OSError):
            parent = os.path.dirname(path)
            os.chmod(parent, stat.S_IRWXU)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.chmod(path, stat.S_IRWXU)
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    shutil.rmtree(directory, onerror=unlock_and_retry)
