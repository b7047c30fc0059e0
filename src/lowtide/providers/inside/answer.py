"""What the program inside answers to a file call: a line, then bytes."""

from __future__ import annotations

import posixpath
import struct
from collections.abc import AsyncIterator
from typing import Any

from lowtide.errors import SandboxFileError, SandboxUnavailableError
from lowtide.providers.inside.errors import file_error
from lowtide.providers.inside.process import InsideProcess

LENGTH = struct.Struct("<L")
_ERROR = 0x80000000
_LONGEST_NAME = 1 << 14


class Answer:
    """Reads it as it comes; whatever does not fit is an error, never data."""

    def __init__(self, process: InsideProcess, path: str, **context: Any) -> None:
        self._process, self._path, self._context = process, path, context
        self._rest = b""

    async def piece(self) -> bytes:
        """The next bytes; b"" at the end."""
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        while (chunk := await self._process.next()) is not None:
            if chunk[0] == 1:
                return chunk[1]
        return b""

    async def expect(self, word: str) -> list[str]:
        data = b""
        while b"\n" not in data:
            more = await self.piece()
            if not more or len(data) > 400:
                raise self.cut_short(data)
            data += more
        line, _, self._rest = data.partition(b"\n")
        words = line.decode("utf-8", "replace").split()
        if len(words) == 2 and words[0] == "error" and words[1].isdecimal():
            raise file_error(int(words[1]), self._path, **self._context)
        if not words or words[0] != word:
            raise self.cut_short(line)
        return words

    async def pieces(self) -> AsyncIterator[bytes]:
        """Data with its length before each part, up to the part of no length."""
        data = b""
        while True:
            while len(data) < LENGTH.size:
                more = await self.piece()
                if not more:
                    raise self.cut_short()
                data += more
            (left,) = LENGTH.unpack_from(data)
            data = data[LENGTH.size :]
            if left & _ERROR:
                raise file_error(left & ~_ERROR, await self._about(data), **self._context)
            if left == 0:
                return
            while left:
                data = data or await self.piece()
                if not data:
                    raise self.cut_short()
                part, data = data[:left], data[left:]
                left -= len(part)
                yield part

    async def _about(self, name: bytes) -> str:
        """The path that an error is about: of a tree, what comes after it names something in there."""
        while len(name) < _LONGEST_NAME and (more := await self.piece()):
            name += more
        below = name[:_LONGEST_NAME].decode("utf-8", "surrogateescape")
        return posixpath.join(self._path, below.lstrip("/")) if below else self._path

    def cut_short(self, said: bytes = b"") -> SandboxUnavailableError:
        words = said[:400].decode("utf-8", "replace").strip()
        return SandboxUnavailableError(
            f"{self._path}: the file call was cut short{': ' + words if words else ''}", **self._context
        )

    def too_much(self, most: int, most_bytes: int) -> SandboxFileError:
        return SandboxFileError(
            f"{self._path} holds too much to be listed in memory (more than {most} entries or {most_bytes >> 20} MiB of "
            "names); exec a command that looks for what you want",
            path=self._path,
            **self._context,
        )
