"""What a sandbox's main command printed last: read from the file in its directory that its process 1 keeps.

`first/first.c` writes it: a ring, and behind it how much was printed in all. Nobody inside can open it, it never grows
beyond that, and it goes with the directory. It needs no process to be read: not the owner's, and not the sandbox's.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator

from lowtide.errors import SandboxNotFoundError
from lowtide.providers.last_lines import last_lines
from lowtide.providers.local.sandbox_directory import SandboxDirectory

KEPT_BYTES = 1 << 20
_PIECE = 1 << 16  # of the ring, may just be overwritten
_RING = KEPT_BYTES + _PIECE
_PRINTED = struct.Struct("=Q")
_LOOK_SECONDS = 0.05


async def read(directory: SandboxDirectory, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
    if directory.info() is None:
        raise SandboxNotFoundError(
            f"there is no sandbox {directory.sandbox_id}", provider="local", sandbox_id=directory.sandbox_id
        )
    log = _Log(directory)
    try:
        ended = not follow or _ended(directory)  # asked first: what was printed before that is in the log
        data, cut = log.more()
        data = last_lines(data, tail_lines, cut=cut)
        while True:
            if data:
                yield data
            if ended:
                return
            whole = data.endswith(b"\n")
            await asyncio.sleep(_LOOK_SECONDS)
            ended = _ended(directory)
            data, cut = log.more()
            if cut:  # whoever reads slower than it prints misses whole lines, and sees where a line begins
                data = (b"" if whole else b"\n") + last_lines(data, None, cut=True)
    finally:
        log.close()


class _Log:
    """Where a reader is."""

    def __init__(self, directory: SandboxDirectory) -> None:
        self._path = f"{directory.path}/log"
        self._fd = -1
        self._at = 0

    def more(self) -> tuple[bytes, bool]:
        """What was printed since, as far as it is kept; and whether it is not all."""
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
        if self._fd >= 0:
            os.close(self._fd)


def _ended(directory: SandboxDirectory) -> bool:
    info = directory.info()
    return info is None or info.state.terminal
