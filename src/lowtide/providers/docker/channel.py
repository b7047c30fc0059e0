"""One standing connection into a container, over which commands start in a millisecond.

The engine's exec takes tens of milliseconds for each command. So one exec per sandbox runs `inside
serve`, which starts commands for us and carries their streams in frames. It has the rights of any
other exec in the container. Commands with a terminal or another user take the engine's way instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from lowtide.errors import LowtideError, ResourceExhaustedError, SandboxUnavailableError, ValidationError
from lowtide.providers.base import ProcessSpec, TerminalSize
from lowtide.providers.docker import inside
from lowtide.providers.docker.client import EngineClient, RawStream
from lowtide.providers.docker.output import Output

START, INPUT, INPUT_END, SIGNAL, END, CREDIT = range(1, 7)
STDOUT, STDERR, EXITED, STARTED, INPUT_BROKEN, INPUT_TAKEN, REFUSED = range(1, 8)

_HEAD = struct.Struct("<LBL")
_NUMBER = struct.Struct("<L")
_START = struct.Struct("<BHH")
_WINDOW = 256 * 1024  # of standard input on its way to one command
_PIECE = 64 * 1024
_REPAY = 256 * 1024  # of output read before the other side hears of it
_MOST = 4 * 1024 * 1024 - 64
_COMMANDS = 1000  # at once; inside.c has room for a few more

Explain = Callable[[LowtideError], Coroutine[Any, Any, LowtideError]]


class ChannelFull(ResourceExhaustedError):
    """As many commands at once as it can carry; the engine's own way is still open."""


class Channel:
    """The connection to `inside serve` in one container."""

    def __init__(self, client: EngineClient, sandbox_id: str, explain: Explain) -> None:
        self._client = client
        self.sandbox_id = sandbox_id
        self._explain = explain
        self._stream = RawStream(on_data=self._arrived)
        self._processes: dict[int, ChannelProcess] = {}
        self._next = 0
        self._buffer = bytearray()
        self._open: asyncio.Future[None] = client.loop.create_future()
        self._noise = b""

    async def open(self) -> None:
        made = await self._client.container(self.sandbox_id).exec([inside.PROGRAM, "serve"], stdin=True)
        await self._client.attach(f"exec/{made.id}/start", {"Detach": False, "Tty": False}, self._stream)
        self._stream.closed.add_done_callback(self._lost)
        await self._open

    @property
    def alive(self) -> bool:
        return not self._stream.closed.done()

    def close(self) -> None:
        self._stream.close()

    async def start(self, spec: ProcessSpec) -> ChannelProcess:
        if len(self._processes) >= _COMMANDS:
            raise ChannelFull(
                f"{_COMMANDS} commands run at once", provider="docker", sandbox_id=self.sandbox_id
            )
        self._next += 1
        process = ChannelProcess(self, self._next, stdin=spec.stdin)
        words = [spec.cwd or "", *spec.argv, *(f"{key}={value}" for key, value in spec.environment.items())]
        data = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)
        if len(data) > _MOST or len(spec.argv) > 60_000 or len(spec.environment) > 8_000:
            raise ValidationError("the command line is too long", argument="command", provider="docker")
        self._processes[process.number] = process
        head = _START.pack(1 if spec.stdin else 0, len(spec.argv), len(spec.environment))
        try:
            await self.send(START, process.number, head + data)
            await process.started
        except BaseException:
            # Given up while it was starting: nobody would ever end it.
            self._processes.pop(process.number, None)
            self.send_soon(END, process.number, _NUMBER.pack(0))
            raise
        return process

    async def send(self, kind: int, number: int, data: bytes = b"") -> None:
        """Raises BrokenPipeError when the connection is gone."""
        await self._stream.write(_HEAD.pack(len(data) + 5, kind, number) + data)

    def send_soon(self, kind: int, number: int, data: bytes = b"") -> None:
        if self.alive:
            self._stream.request(_HEAD.pack(len(data) + 5, kind, number) + data)

    def _arrived(self, stream: int, data: bytes) -> None:
        if stream != 1:
            self._noise = (self._noise + data)[-400:]
            return
        buffer = self._buffer
        buffer += data
        if not self._open.done():
            if len(buffer) < 3:
                return
            if not buffer.startswith(b"ok\n"):
                self._noise = bytes(buffer[:400])
                self._stream.close()
                return
            del buffer[:3]
            self._open.set_result(None)
        at, size = 0, len(buffer)
        while size - at >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(buffer, at)
            if not 5 <= length <= _MOST:  # only our own program writes here; anything else is an attack
                self._stream.close()
                return
            end = at + 4 + length
            if end > size:
                break
            process = self._processes.get(number)
            if process is not None:
                process.take(kind, bytes(buffer[at + 9 : end]))
                if process.output_.ended or kind == REFUSED:
                    del self._processes[number]
            at = end
        del buffer[:at]

    def _lost(self, _: Any) -> None:
        error: LowtideError = SandboxUnavailableError(
            f"the connection into the sandbox broke {self._noise.decode('utf-8', 'replace').strip()}".strip(),
            provider="docker",
            sandbox_id=self.sandbox_id,
        )
        processes, self._processes = self._processes, {}
        if self._open.done() and not processes:
            return
        self._telling = self._client.loop.create_task(self._tell(error, list(processes.values())))

    async def _tell(self, error: LowtideError, processes: list[ChannelProcess]) -> None:
        """The connection breaks when the sandbox ends: find out, and say that instead."""
        if processes or not self._open.done():
            error = await self._explain(error)
        if not self._open.done():
            self._open.set_exception(error)
        for process in processes:
            process.fail(error)


class ChannelProcess:
    """Implements `ProcessHandle`."""

    def __init__(self, channel: Channel, number: int, *, stdin: bool) -> None:
        loop = asyncio.get_running_loop()
        self._channel = channel
        self.number = number
        self.started: asyncio.Future[None] = loop.create_future()
        self.output_ = Output(self._read)
        self._unpaid = 0
        self._on_the_way = 0
        self._input_open = stdin
        self._taken = asyncio.Event()
        self._deaf = False

    # -- what the seam asks for

    def output(self) -> AsyncIterator[tuple[int, bytes]]:
        return self.output_.chunks()

    async def wait(self) -> int:
        return await self.output_.wait()

    async def write_stdin(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            while self._input_open and self._on_the_way + len(piece) > _WINDOW:
                self._taken.clear()
                await self._taken.wait()
            if not self._input_open or self.output_.ended:
                raise BrokenPipeError("the command takes no more input")
            self._on_the_way += len(piece)
            await self._channel.send(INPUT, self.number, piece)

    async def close_stdin(self) -> None:
        if self._input_open:
            self._input_open = False
            self._channel.send_soon(INPUT_END, self.number)

    async def resize(self, size: TerminalSize) -> None:
        """Without a terminal there is nothing to resize."""

    async def signal(self, number: int) -> None:
        if not self.output_.ended:
            self._channel.send_soon(SIGNAL, self.number, _NUMBER.pack(int(signal.Signals(number))))

    async def terminate(self, grace_seconds: float) -> None:
        if self.output_.ended:
            return
        grace = max(0, int(grace_seconds * 1000))
        self._channel.send_soon(END, self.number, _NUMBER.pack(grace))
        self._channel.send_soon(
            CREDIT, self.number, _NUMBER.pack(1 << 20)
        )  # a reader may have stopped reading
        with contextlib.suppress(TimeoutError, LowtideError):
            async with asyncio.timeout(grace_seconds + 40):
                await self.wait()

    async def aclose(self) -> None:
        """Nobody reads on: what it still writes is dropped, so that it never waits for a reader."""
        if self.output_.ended:
            return
        self._deaf = True
        self.output_.forget()
        self._channel.send_soon(CREDIT, self.number, _NUMBER.pack(1 << 20))

    # -- as a stream, for our own calls

    async def next(self) -> tuple[int, bytes] | None:
        return await self.output_.next()

    async def write(self, data: bytes) -> None:
        await self.write_stdin(data)

    def write_eof(self) -> None:
        if self._input_open:
            self._input_open = False
            self._channel.send_soon(INPUT_END, self.number)

    def close(self) -> None:
        if not self.output_.ended:
            self._channel.send_soon(END, self.number, _NUMBER.pack(0))
            self._channel.send_soon(CREDIT, self.number, _NUMBER.pack(1 << 30))

    # -- from the channel

    def take(self, kind: int, data: bytes) -> None:
        if kind in (STDOUT, STDERR):
            if self._deaf:
                self._read(len(data))
            else:
                self.output_.put(kind, data)
        elif kind == EXITED:
            self._end_input()
            self.output_.finish(_number(data) & 0xFF)
        elif kind == STARTED and not self.started.done():
            self.started.set_result(None)
        elif kind == INPUT_TAKEN:
            self._on_the_way = max(0, self._on_the_way - _number(data))
            self._taken.set()
        elif kind == INPUT_BROKEN:
            self._end_input()
        elif kind == REFUSED:
            self.fail(
                ResourceExhaustedError(
                    "the sandbox can start no more processes",
                    provider="docker",
                    sandbox_id=self._channel.sandbox_id,
                )
            )

    def fail(self, error: LowtideError) -> None:
        self._end_input()
        if not self.started.done():
            self.started.set_exception(error)
        self.output_.finish(error)

    def _end_input(self) -> None:
        self._input_open = False
        self._taken.set()

    def _read(self, size: int) -> None:
        self._unpaid += size
        if self._unpaid >= _REPAY:
            self._channel.send_soon(CREDIT, self.number, _NUMBER.pack(self._unpaid))
            self._unpaid = 0


def _number(data: bytes) -> int:
    return int(_NUMBER.unpack(data[:4])[0]) if len(data) >= 4 else 0
