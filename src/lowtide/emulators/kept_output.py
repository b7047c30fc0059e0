"""What a command printed, the last of it: bounded, and on disk when it is long."""

from __future__ import annotations

import tempfile
from typing import IO

IN_MEMORY_BYTES = 1 << 20
KEPT_BYTES = 16 << 20
"""At least half of this is kept of a longer output. The rest is dropped, the oldest first."""


class KeptOutput:
    """Bytes by their offset from the first one printed. Those before `first` are not kept any more."""

    def __init__(self) -> None:
        self.first = self.size = 0
        self._older, self._newer = _file(), _file()
        self._boundary = 0
        """The offset at which the newer file begins."""

    def add(self, data: bytes) -> None:
        half = KEPT_BYTES // 2
        view = memoryview(data)
        while view:
            if self.size - self._boundary >= half:
                self._older.close()
                self._older, self._newer = self._newer, _file()
                self.first, self._boundary = self._boundary, self.size
            room = half - (self.size - self._boundary)
            self._newer.seek(self.size - self._boundary)
            self._newer.write(view[:room])
            self.size += len(view[:room])
            view = view[room:]

    def read(self, at: int, length: int) -> bytes:
        """Up to `length` bytes from `at` on; from `first` on where `at` is not kept any more."""
        end = min(at + length, self.size)
        at = max(at, self.first)
        found = b""
        if at < self._boundary:
            self._older.seek(at - self.first)
            found = self._older.read(min(end, self._boundary) - at)
            at = self._boundary
        if at < end:
            self._newer.seek(at - self._boundary)
            found += self._newer.read(end - at)
        return found

    def close(self) -> None:
        self._older.close()
        self._newer.close()


def _file() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)
