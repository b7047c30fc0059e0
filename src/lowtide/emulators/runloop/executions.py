"""One command of a devbox: what it printed, from any offset, what it still reads, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal as signal_numbers
from typing import Any

from lowtide.emulators.kept_output import KeptOutput
from lowtide.emulators.runloop.model import Refused, new_id
from lowtide.errors import LowtideError
from lowtide.providers.base import STDERR, STDOUT, ProcessHandle

_LINES = 100
_PIECE = 64 << 10
_MOST_SHOWN = 8 << 20  # of one stream in one answer: lines may be long
STREAMS = {"stdout": STDOUT, "stderr": STDERR}


class Printed:
    """What one stream carried, in bytes: the last of it, where it is long (`KeptOutput`)."""

    def __init__(self) -> None:
        self._kept = KeptOutput()
        self.over = False
        self.news = asyncio.Event()

    @property
    def size(self) -> int:
        return self._kept.size

    def add(self, data: bytes) -> None:
        self._kept.add(data)
        self._wake()

    def end(self) -> None:
        self.over = True
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def read(self, at: int, length: int) -> bytes:
        return self._kept.read(at, length)

    def text_from(self, at: int) -> tuple[str, int]:
        """A piece of text from an offset, and where the next begins: a character is never cut in two."""
        at = max(at, self._kept.first)
        data = self.read(at, _PIECE)
        if not self.over or at + len(data) < self.size:
            data = data[: len(data) - _unfinished(data)]
        return data.decode("utf-8", "replace"), at + len(data)

    def tail(self, lines: int) -> tuple[str, bool]:
        """The last lines, and whether something stands before them."""
        at, pieces, ends = self.size, [], 0
        while at > self._kept.first and ends <= lines and self.size - at < _MOST_SHOWN:
            start = max(self._kept.first, at - _PIECE)
            pieces.append(self.read(start, at - start))
            ends += pieces[-1].count(b"\n")
            at = start
        kept = b"".join(reversed(pieces)).splitlines(keepends=True)[-lines:] if lines else []
        text = b"".join(kept)
        return text.decode("utf-8", "replace"), len(text) < self.size


class Execution:
    """A started command. It goes on whether or not anybody looks."""

    def __init__(self, devbox_id: str, handle: ProcessHandle, *, stdin: bool = False) -> None:
        self.execution_id = new_id("exec")
        self.devbox_id = devbox_id
        self.stdin = stdin
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self.printed = {STDOUT: Printed(), STDERR: Printed()}
        self._handle = handle
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        code = -1
        try:
            async for stream, data in self._handle.output():
                self.printed[stream].add(data)
            code = await self._handle.wait()
        except LowtideError:
            pass
        finally:
            self.exit_code = code
            for printed in self.printed.values():
                printed.end()
            self.ended.set()
            await self._handle.aclose()

    def view(self, last_lines: int = _LINES) -> dict[str, Any]:
        shown: dict[str, Any] = {"devbox_id": self.devbox_id, "execution_id": self.execution_id}
        if not self.ended.is_set():
            return {**shown, "status": "running"}
        stdout, cut_out = self.printed[STDOUT].tail(last_lines)
        stderr, cut_err = self.printed[STDERR].tail(last_lines)
        return {
            **shown,
            "status": "completed",
            "exit_status": self.exit_code,
            "stdout": stdout,
            "stderr": stderr,
            "stdout_truncated": cut_out,
            "stderr_truncated": cut_err,
        }

    async def wait(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        return self.ended.is_set()

    async def ended_or(self, cut: asyncio.Event) -> None:
        """Until it has ended, or what it runs in has."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (self.ended, cut)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    async def send(self, text: str | None, signal: str | None) -> None:
        if not self.stdin:
            raise Refused(400, "this execution was started without attach_stdin")
        if self.ended.is_set():
            raise Refused(400, "this execution has completed")
        try:
            if text:
                await self._handle.write_stdin(text.encode())
            if signal == "EOF":
                await self._handle.close_stdin()
            elif signal == "INTERRUPT":
                await self._handle.signal(signal_numbers.SIGINT)
        except BrokenPipeError:
            raise Refused(400, "this execution reads its standard input no more") from None

    async def kill(self) -> None:
        with contextlib.suppress(LowtideError):
            await self._handle.terminate(0.0)
        await self.wait(5.0)

    async def aclose(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading


def _unfinished(data: bytes) -> int:
    """How many of the last bytes are the beginning of a character whose rest is not there yet."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
        if byte < 0x80:
            return 0
    return 0
