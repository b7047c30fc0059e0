"""One command that the program inside runs: `InsideProcess`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from lowtide.errors import (
    LowtideError,
    ResourceExhaustedError,
    SandboxError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.base import STDERR, ProcessSpec, TerminalSize
from lowtide.providers.inside import frames
from lowtide.providers.inside.output import Output

if TYPE_CHECKING:
    from lowtide.providers.inside.client import Client

_END_SECONDS = 30.0
"""After the grace: how long the program may take to say that the tree is gone, or that it is not."""


class InsideProcess:
    """Implements `ProcessHandle`."""

    def __init__(self, client: Client, number: int, spec: ProcessSpec) -> None:
        loop = asyncio.get_running_loop()
        self._client = client
        self.number = number
        self._spec = spec
        self.started: asyncio.Future[None] = loop.create_future()
        self._output = Output(self._read)
        self._ended: asyncio.Future[int] | None = None
        self._unpaid = 0
        self._on_the_way = 0
        self._input_open = spec.stdin or spec.tty is not None
        self._taken = asyncio.Event()
        self._deaf = False
        self.exited = False
        """Its own process has ended; others may still hold its streams."""
        self.streams_open = False

    # -- what the seam asks for

    def output(self) -> AsyncIterator[tuple[int, bytes]]:
        return self._output.chunks()

    async def wait(self) -> int:
        return await self._output.wait()

    async def write_stdin(self, data: bytes) -> None:
        for at in range(0, len(data), frames.PIECE):
            piece = data[at : at + frames.PIECE]
            while self._input_open and self._on_the_way + len(piece) > frames.INPUT_WINDOW:
                self._taken.clear()
                await self._taken.wait()
            if not self._input_open or self._output.ended:
                raise BrokenPipeError("the command takes no more input")
            self._on_the_way += len(piece)
            self._client.tell(frames.INPUT, self.number, piece)
            await self._client.room()

    async def close_stdin(self) -> None:
        if self._input_open:
            self._input_open = False
            self._client.tell_if_alive(frames.INPUT_END, self.number)

    async def resize(self, size: TerminalSize) -> None:
        if self._spec.tty is not None and not self._output.ended:
            data = frames.SIZE.pack(size.rows, size.columns)
            self._client.tell_if_alive(frames.RESIZE, self.number, data)

    async def signal(self, number: int) -> None:
        if not self._output.ended:
            data = frames.NUMBER.pack(int(signal.Signals(number)))
            self._client.tell_if_alive(frames.SIGNAL, self.number, data)

    async def terminate(self, grace_seconds: float) -> None:
        """Returns when the program says that nothing of the tree is left. Raises SandboxError when it cannot say so."""
        if self._output.ended:
            return
        if self._ended is None or self._ended.done():
            self._ended = asyncio.get_running_loop().create_future()
        grace = min(max(0, int(grace_seconds * 1000)), 0xFFFFFFFF)
        self._client.tell_if_alive(frames.END, self.number, frames.NUMBER.pack(grace))
        self._repay(1 << 20)  # a reader may have stopped reading
        left = 0
        try:
            async with asyncio.timeout(grace_seconds + _END_SECONDS):
                left = await asyncio.shield(self._ended)
        except TimeoutError as error:
            raise SandboxError(
                "the sandbox did not say that the command has ended", **self._context
            ) from error
        except LowtideError:
            return  # the sandbox itself is gone or out of reach, which its output and `wait` say
        if left:
            raise SandboxError(
                f"{left} processes of the command could not be ended: destroy the sandbox", **self._context
            )
        with contextlib.suppress(TimeoutError, LowtideError):
            async with asyncio.timeout(10):
                await self.wait()

    async def aclose(self) -> None:
        """Nobody reads on: what it still writes is dropped, so that it never waits for a reader."""
        if self._output.ended:
            return
        self._deaf = True
        self._output.forget()
        self._client.tell_if_alive(frames.FORGET, self.number)

    # -- as a stream, for our own calls

    async def next(self) -> tuple[int, bytes] | None:
        return await self._output.next()

    async def finish_input(self) -> None:
        """Let it notice that no more comes, so that it removes what it had half written."""
        await self.close_stdin()
        with contextlib.suppress(LowtideError, TimeoutError):
            async with asyncio.timeout(5):
                while await self.next() is not None:
                    pass

    def abandon(self) -> None:
        """End it and hear no more of it."""
        if not self._output.ended:
            self._client.tell_if_alive(frames.END, self.number, frames.NUMBER.pack(0))
            self._client.tell_if_alive(frames.FORGET, self.number)

    # -- from the client

    @property
    def over(self) -> bool:
        """Whether nothing more can come for it."""
        return self._output.ended and (self._ended is None or self._ended.done())

    def take(self, kind: int, data: bytes) -> None:
        if kind in (frames.STDOUT, frames.STDERR):
            if self._deaf or not data:
                return
            if self._output.waiting > frames.MOST_UNREAD:
                raise SandboxUnavailableError(
                    "what answers in the sandbox is not lowtide's program: more output than was asked for",
                    retryable=False,
                    **self._context,
                )
            self._output.put(STDERR if kind == frames.STDERR else 1, data)
        elif kind == frames.EXITED:
            self._end_input()
            if (
                not self.started.done()
            ):  # a program that leaves out the start must not leave us waiting for it
                self.started.set_result(None)
            self.exited, self.streams_open = True, bool(frames.value(data) & frames.STREAMS_OPEN)
            self._output.finish(frames.value(data) & 0xFF)
        elif kind == frames.STARTED and not self.started.done():
            self.started.set_result(None)
        elif kind == frames.LEFT and not self.exited:
            self.exited = True
            asyncio.get_running_loop().call_later(self._spec.drain_seconds, self._settle)
        elif kind == frames.INPUT_TAKEN:
            self._on_the_way = max(0, self._on_the_way - frames.value(data))
            self._taken.set()
        elif kind == frames.INPUT_BROKEN:
            self._end_input()
        elif kind == frames.ENDED and self._ended is not None and not self._ended.done():
            self._ended.set_result(frames.value(data))
        elif kind == frames.REFUSED:
            self.fail(self._refused(frames.value(data)))

    def fail(self, error: LowtideError) -> None:
        self._end_input()
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()
        self._output.finish(error)

    @property
    def _context(self) -> dict[str, Any]:
        return {"provider": self._client.provider, "sandbox_id": self._client.sandbox_id}

    def _refused(self, number: int) -> LowtideError:
        if number == frames.UNKNOWN_USER:
            return ValidationError(
                f"the sandbox knows no user {self._spec.user}", argument="user", **self._context
            )
        if self._spec.user and number in (1, 22):
            return ValidationError(
                f"the sandbox's own user may not become {self._spec.user}: create it with a user who may, "
                "or leave the user out",
                argument="user",
                **self._context,
            )
        return ResourceExhaustedError("the sandbox can start no more processes", **self._context)

    def _settle(self) -> None:
        """Long enough: what is there is still read, and no more."""
        if not self._output.ended:
            self._client.tell_if_alive(frames.SETTLE, self.number)

    def _end_input(self) -> None:
        self._input_open = False
        self._taken.set()

    def _read(self, size: int) -> None:
        self._unpaid += size
        if self._unpaid >= frames.REPAY:
            self._repay(self._unpaid)
            self._unpaid = 0

    def _repay(self, size: int) -> None:
        self._client.tell_if_alive(frames.CREDIT, self.number, frames.NUMBER.pack(size))
