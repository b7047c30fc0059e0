"""Streams to the action server through a command in the sandbox: no address outside is needed."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import itertools

from lowtide.errors import LowtideError, SandboxUnavailableError
from lowtide.providers.base import STDOUT, ProcessHandle
from lowtide.runtime.client import Streams

_LIMIT = 64 << 20
_CHUNK = 48 << 10
_LONGEST_LINE = 1 << 20
_SAID_BYTES = 4000


class Relay:
    """The other end of `lowtide.actionserver.relay`: many connections over one command's input and output."""

    def __init__(self, handle: ProcessHandle) -> None:
        self._handle = handle
        self._numbers = itertools.count(1)
        self._readers: dict[int, asyncio.StreamReader] = {}
        self._ready = asyncio.Event()
        self._said = b""
        self._sending = asyncio.Lock()
        self._full: set[int] = set()
        self._room = asyncio.Event()
        self._room.set()
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._receive())

    async def ready(self) -> None:
        """Raises SandboxUnavailableError when it could not be started."""
        await self._ready.wait()
        if self._ended:
            said = self._said.decode("utf-8", "replace").strip()[-500:]
            raise SandboxUnavailableError(f"the relay in the sandbox ended: {said}")

    async def open(self) -> Streams:
        if self._ended:
            raise SandboxUnavailableError("the relay in the sandbox has ended")
        number = next(self._numbers)
        reader = self._readers[number] = asyncio.StreamReader(limit=_LIMIT)
        reader.set_transport(_Pause(self, number))  # type: ignore[arg-type]
        return reader, _RelayWriter(self, number)

    def pause(self, number: int, *, full: bool) -> None:
        """A connection's reader is full, or has room again. While one is full nothing is taken in."""
        (self._full.add if full else self._full.discard)(number)
        (self._room.clear if self._full else self._room.set)()

    async def send(self, number: int, data: bytes) -> None:
        lines = b"".join(
            b"%d %b\n" % (number, binascii.b2a_base64(data[at : at + _CHUNK], newline=False))
            for at in range(0, max(1, len(data)), _CHUNK)
        )
        async with self._sending:
            await self._handle.write_stdin(lines)

    def forget(self, number: int) -> None:
        self.pause(number, full=False)
        if self._readers.pop(number, None) is not None and not self._ended:
            task = asyncio.get_running_loop().create_task(self._hang_up(number))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """End the command."""
        self._ended = True
        with contextlib.suppress(LowtideError, OSError):
            await self._handle.close_stdin()
            await self._handle.terminate(0.5)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # what it broke on came from the sandbox
            await self._task
        await self._handle.aclose()

    _closing: set[asyncio.Task[None]] = set()  # noqa: RUF012 - the loop itself only holds tasks weakly

    async def _hang_up(self, number: int) -> None:
        with contextlib.suppress(LowtideError, OSError):
            await self.send(number, b"")

    async def _receive(self) -> None:
        held = bytearray()
        try:
            async for stream, data in self._handle.output():
                if stream != STDOUT:
                    self._note(data)
                    continue
                *ends, rest = data.split(b"\n")
                for end in ends:
                    self._line(bytes(held + end))
                    held.clear()
                held += rest
                if len(held) > _LONGEST_LINE:  # no relay of ours says that
                    break
                await self._room.wait()  # whoever reads takes it first
        finally:
            self._ended = True
            self._note(bytes(held[:_SAID_BYTES]))
            self._ready.set()
            for reader in self._readers.values():
                reader.feed_eof()

    def _note(self, said: bytes) -> None:
        self._said = (self._said + said)[-_SAID_BYTES:]

    def _line(self, line: bytes) -> None:
        number, _, text = line.partition(b" ")
        try:
            data = binascii.a2b_base64(text)
            which = int(number)
        except (ValueError, binascii.Error):
            self._note(line + b"\n")
            return
        if which == 0:
            self._ready.set()
            return
        reader = self._readers.get(which)
        if reader is None:
            return
        if data and not reader._eof:  # type: ignore[attr-defined]  # after its end nothing is fed
            reader.feed_data(data)
        else:
            reader.feed_eof()


class _Pause:
    """What a StreamReader asks for when it holds too much."""

    def __init__(self, relay: Relay, number: int) -> None:
        self._relay, self._number = relay, number

    def pause_reading(self) -> None:
        self._relay.pause(self._number, full=True)

    def resume_reading(self) -> None:
        self._relay.pause(self._number, full=False)


class _RelayWriter:
    def __init__(self, relay: Relay, number: int) -> None:
        self._relay, self._number = relay, number
        self._held = bytearray()

    def write(self, data: bytes) -> None:
        self._held += data

    async def drain(self) -> None:
        data, self._held = bytes(self._held), bytearray()
        await self._relay.send(self._number, data)

    def close(self) -> None:
        self._relay.forget(self._number)
