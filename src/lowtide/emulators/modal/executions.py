"""Commands in a sandbox: what they print, readable from any offset; their input, each byte once; their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from lowtide.emulators.finish import finished
from lowtide.emulators.modal.refusal import invalid
from lowtide.errors import LowtideError
from lowtide.providers.base import STDERR, STDOUT, ProcessHandle

_IN_MEMORY = 64 << 10  # of each stream of each command, until its sandbox ends
_PIECE = 256 << 10


class Output:
    """One stream of a command, kept whole: in memory while it is short, then in a file.

    The file is open while it grows, and after that only while it is read: commands that have ended are many.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory = bytearray()
        self._file: int | None = None
        self._path: str | None = None
        self.size = 0
        self.over = False
        self._news = asyncio.Event()

    def add(self, data: bytes) -> None:
        if self._file is None and self.size + len(data) > _IN_MEMORY:
            self._spill()
        if self._file is None:
            self._memory += data
        else:
            _write(self._file, data)
        self.size += len(data)
        self._wake()

    def _spill(self) -> None:
        file, path = tempfile.mkstemp(prefix="output-", dir=self._folder)
        try:
            _write(file, self._memory)
        except OSError:  # no room: what is in memory stays readable
            os.close(file)
            os.unlink(path)
            raise
        self._file, self._path, self._memory = file, path, bytearray()

    def end(self) -> None:
        self.over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._wake()

    def close(self) -> None:
        """Nobody reads it any more."""
        self.end()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path, self.size = None, 0

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, offset: int) -> AsyncIterator[bytes]:
        """From `offset` to its end, as it comes."""
        while True:
            news = self._news
            while offset < self.size:
                piece = self._read(offset)
                offset += len(piece)
                yield piece
            if self.over:
                return
            await news.wait()

    def _read(self, offset: int) -> bytes:
        if self._path is None:
            return bytes(self._memory[offset : offset + _PIECE])
        if self._file is not None:
            return os.pread(self._file, _PIECE, offset)
        with open(self._path, "rb") as file:
            return os.pread(file.fileno(), _PIECE, offset)


class Execution:
    """One command. `over` is set once its end is known and all it printed is there."""

    def __init__(self, handle: ProcessHandle, folder: Path, *, keep: tuple[bool, bool], merge: bool) -> None:
        self.handle = handle
        self.stdout, self.stderr = Output(folder), Output(folder)
        self.code: int | None = None
        self.over = asyncio.Event()
        self.lost = False
        self._keep, self._merge = keep, merge
        self._written, self._closed = 0, False
        self._input = asyncio.Lock()

    async def run(self, ended: Callable[[], None]) -> None:
        """Takes what it prints until it ends."""
        try:
            async for stream, data in self.handle.output():
                if stream == STDOUT or (stream == STDERR and self._merge):
                    if self._keep[0]:
                        self.stdout.add(data)
                elif self._keep[1]:
                    self.stderr.add(data)
            self.code = await self.handle.wait()
        except (LowtideError, OSError):
            self.lost = True
        finally:
            self.stdout.end()
            self.stderr.end()
            self.over.set()
            ended()
            with contextlib.suppress(LowtideError):
                await self.handle.aclose()

    async def write(self, offset: int, data: bytes, eof: bool) -> None:
        """Input at an offset: what came before already is dropped, what would leave a hole is refused.

        Finished without its caller: one that lost its connection half way sends all of it again.
        """
        await finished(self._write(offset, data, eof))

    async def _write(self, offset: int, data: bytes, eof: bool) -> None:
        async with self._input:
            if offset > self._written:
                raise invalid("offset", f"{offset} is beyond the {self._written} bytes written")
            fresh = data[self._written - offset :]
            if not self._closed:
                with contextlib.suppress(BrokenPipeError, LowtideError):
                    if fresh:
                        await self.handle.write_stdin(fresh)
                self._written += len(fresh)
                if eof:
                    self._closed = True
                    with contextlib.suppress(BrokenPipeError, LowtideError):
                        await self.handle.close_stdin()

    @property
    def input_state(self) -> tuple[int, bool]:
        return self._written, self._closed

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()


def _write(file: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
