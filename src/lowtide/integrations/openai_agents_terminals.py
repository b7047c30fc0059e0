"""Commands of the OpenAI Agents SDK that go on beyond one call: their output, their input, their end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
)

from lowtide.errors import LowtideError
from lowtide.process import Process
from lowtide.stream import StreamReader

_KEPT_BYTES = 512 << 10
"""Of what a command printed since the last look: so much of its beginning, and of its end. All would be any amount."""
_START_MS = 10_000
_WRITE_MS = 250


@dataclass(slots=True)
class Terminal:
    """One running command, and what it printed that nobody has read yet."""

    process: Process
    tty: bool
    chunks: deque[bytes] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    last_used: float = field(default_factory=time.monotonic)
    exit_code: int | None = None
    reading: asyncio.Task[None] | None = None
    _passed_on: int = 0
    """Bytes since the last look that are in `chunks`, or were."""
    _latest: deque[bytes] = field(default_factory=deque)
    """What came after those: the end of it, once a look is over."""
    _latest_bytes: int = 0
    _dropped_bytes: int = 0

    async def read(self) -> None:
        """Until its end: what it prints, then how it ended."""
        await asyncio.gather(self._pump(self.process.stdout), self._pump(self.process.stderr))
        try:
            self.exit_code = (await self.process).returncode
        except LowtideError as error:
            await self._add(f"\n[{error}]\n".encode())
            self.exit_code = 1 if self.process.returncode is None else self.process.returncode
        self.closed.set()
        self.arrived.set()

    async def _pump(self, reader: StreamReader[str]) -> None:
        with contextlib.suppress(LowtideError):  # the process's own result says it
            async for chunk in reader:
                await self._add(chunk.encode("utf-8", "replace"))

    async def _add(self, data: bytes) -> None:
        async with self.lock:
            room = max(0, _KEPT_BYTES - self._passed_on)
            if data[:room]:
                self.chunks.append(data[:room])
                self._passed_on += len(data[:room])
            if data[room:]:
                self._latest.append(data[room:])
                self._latest_bytes += len(data[room:])
            while self._latest_bytes > _KEPT_BYTES:
                too_many = self._latest_bytes - _KEPT_BYTES
                oldest = self._latest.popleft()
                if oldest[too_many:]:
                    self._latest.appendleft(oldest[too_many:])
                dropped = min(too_many, len(oldest))
                self._latest_bytes -= dropped
                self._dropped_bytes += dropped
        self.arrived.set()

    async def settle(self) -> None:
        """A look is over: the end of what was printed follows its beginning, and says what is missing between."""
        async with self.lock:
            if self._dropped_bytes:
                self.chunks.append(f"\n[… {self._dropped_bytes} bytes left out …]\n".encode())
            self.chunks.extend(self._latest)
            self._latest.clear()
            self._passed_on = self._latest_bytes = self._dropped_bytes = 0


class Terminals:
    """The running commands of one session, by the number the SDK knows them by."""

    def __init__(self) -> None:
        self.running: dict[int, Terminal] = {}

    async def start(
        self, process: Process, tty: bool, yield_seconds: float | None, max_tokens: int | None
    ) -> PtyExecUpdate:
        """Take over a command that was just started."""
        number = None
        try:
            # The oldest out and this one in, before anybody else looks at how many there are.
            oldest = self._taken_out_for_one_more()
            terminal = Terminal(process, tty)
            number = allocate_pty_process_id(set(self.running))
            self.running[number] = terminal
            terminal.reading = _started(terminal.read())
            if oldest is not None:
                # Nobody knows it any more, so its end does not end with our caller's patience.
                await asyncio.shield(_started(_end(oldest)))
            wait = _START_MS if yield_seconds is None else int(yield_seconds * 1000)
            return await self._update(number, terminal, clamp_pty_yield_time_ms(wait), max_tokens)
        except BaseException:  # given up before anybody heard its number: nobody else could end it
            if number is not None:
                self.running.pop(number, None)
            process.cancel()
            raise

    async def write(
        self,
        number: int,
        terminal: Terminal,
        chars: str,
        yield_seconds: float | None,
        max_tokens: int | None,
    ) -> PtyExecUpdate:
        """Type into it, or with nothing to type only look."""
        terminal.last_used = time.monotonic()
        if chars:
            if terminal.process.stdin is None:
                raise RuntimeError("stdin is not available for this process")
            with contextlib.suppress(BrokenPipeError):  # it has ended, and the update says so
                await terminal.process.stdin.write(chars)
        wait_ms = resolve_pty_write_yield_time_ms(
            yield_time_ms=_WRITE_MS if yield_seconds is None else int(yield_seconds * 1000),
            input_empty=not chars,
        )
        return await self._update(number, terminal, wait_ms, max_tokens)

    async def end_all(self) -> None:
        """None of them is left."""
        ending, self.running = list(self.running.values()), {}
        await asyncio.gather(*(_end(terminal) for terminal in ending))

    async def _update(
        self, number: int, terminal: Terminal, wait_ms: int, max_tokens: int | None
    ) -> PtyExecUpdate:
        output, tokens, over = await collect_pty_output(
            output_chunks=terminal.chunks,
            output_lock=terminal.lock,
            output_notify=terminal.arrived,
            is_done=terminal.closed.is_set,
            settle_output=terminal.settle,
            yield_time_ms=wait_ms,
            max_output_tokens=max_tokens,
        )
        if over:
            self.running.pop(number, None)
        return PtyExecUpdate(
            process_id=None if over else number,
            output=output,
            exit_code=terminal.exit_code if over else None,
            original_token_count=tokens,
        )

    def _taken_out_for_one_more(self) -> Terminal | None:
        if len(self.running) < PTY_PROCESSES_MAX:
            return None
        known = [(number, one.last_used, one.closed.is_set()) for number, one in self.running.items()]
        oldest = process_id_to_prune_from_meta(known)
        return None if oldest is None else self.running.pop(oldest)


async def _end(terminal: Terminal) -> None:
    with contextlib.suppress(LowtideError):  # gone with its sandbox
        await terminal.process.terminate(1.0)
    if terminal.reading is not None:
        await asyncio.gather(terminal.reading, return_exceptions=True)


def _started(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work)
