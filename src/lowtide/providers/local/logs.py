"""What a sandbox's main command printed last: read from the file in its directory that its process 1 keeps.

`first/first.c` writes it: a ring, and behind it how much was printed in all. Nobody inside can open it, it never grows
beyond that, and it goes with the directory. It needs no process to be read: not the owner's, and not the sandbox's.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator

from lowtide import threads
from lowtide.errors import SandboxNotFoundError
from lowtide.providers.last_lines import last_lines
from lowtide.providers.local.sandbox_directory import SandboxDirectory

KEPT_BYTES = 1 << 20
_PIECE = 1 << 16  # of the ring, may just be overwritten
_RING = KEPT_BYTES + _PIECE
_PRINTED = struct.Struct("=Q")
_LOOK_SECONDS = 0.05


async def read(directory: SandboxDirectory, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
    if await asyncio.to_thread(directory.info) is None:
        raise SandboxNotFoundError(
            f"there is no sandbox {directory.sandbox_id}", provider="local", sandbox_id=directory.sandbox_id
        )
    log = _Log(directory)
    try:
        ended, data, cut = await asyncio.to_thread(log.more)
        ended = ended or not follow
        data = last_lines(data, tail_lines, cut=cut)
        whole = True  # nothing is said of a line that has not ended
        while True:
            if data:
                whole = data.endswith(b"\n")
                yield data
            if ended:
                return
            await asyncio.sleep(_LOOK_SECONDS)
            ended, data, cut = await asyncio.to_thread(log.more)
            if cut:  # whoever reads slower than it prints misses whole lines, and sees where a line begins
                data = (b"" if whole else b"\n") + last_lines(data, None, cut=True)
    finally:
        log.close()


class _Log:
    """Where a reader is. Used by one thread at a time: by that of a read whose reader has left until it is over."""

    def __init__(self, directory: SandboxDirectory) -> None:
        self._directory = directory
        self._path = f"{directory.path}/log"
        self._lock = threads.Lock()
        self._fd = -1
        self._closed = False
        self._at = 0

    def more(self) -> tuple[bool, bytes, bool]:
        """Whether the command has ended, what was printed since, as far as it is kept; and whether that is not all."""
        with self._lock:
            if self._closed:
                return True, b"", False
            info = self._directory.info()  # asked first: what was printed before its end is in the log
            return info is None or info.state.terminal, *self._more()

    def _more(self) -> tuple[bytes, bool]:
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b"", False  # it has no main command, or is only being made
        end = self._printed()
        if end == self._at:
            return b"", False
        begin = max(self._at, end - KEPT_BYTES)
        data = b""
        while begin + len(data) < end:
            at = (begin + len(data)) % _RING
            piece = os.pread(self._fd, min(_RING - at, end - begin - len(data)), at)
            if not piece:
                break
            data += piece
        valid = max(
            begin, self._printed() - KEPT_BYTES
        )  # what was overwritten meanwhile was read as something else
        cut, self._at = valid > self._at, end
        return data[valid - begin :], cut

    def _printed(self) -> int:
        told = os.pread(self._fd, _PRINTED.size, _RING)
        return int(_PRINTED.unpack(told)[0]) if len(told) == _PRINTED.size else 0

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._fd >= 0:
                os.close(self._fd)
