"""A stream of bytes each way to the program inside, which outlives the channels it goes over.

What was sent is kept until the other side has taken it, with its place in the stream. After a break the
greeting says where each side is, so that no byte is lost and none comes twice. See `inside.c`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import secrets
import struct
from collections.abc import Callable
from typing import Any

from lowtide.errors import (
    LowtideError,
    RequestTimeoutError,
    ResourceExhaustedError,
    SandboxUnavailableError,
)
from lowtide.providers.inside.channel import Asleep, Channel, Opener, Spent

HEAD = struct.Struct("<LQQ")
GREETING = struct.Struct("<8s16sQBQ")
WELCOME = struct.Struct("<8s16sQBL")
MAGIC = b"LOWTIDE1"
NEW, AGAIN, FORGOTTEN, REFUSED = range(4)

PACKET = 32 * 1024
WINDOW = 4 * 1024 * 1024
"""The most that is under way: what the program can hold."""
_TOLD = 256 * 1024  # taken before the other side hears of it, when nothing else is said
_LONGEST_LINE = 64 * 1024
BOUND_SECONDS = 100.0
"""How long a channel may stay broken. The program waits a little longer before it forgets."""
_GREETING_SECONDS = 30.0
_QUIET_SECONDS = 15.0
"""While a caller waits: how long nothing may arrive before the program is asked whether it is there."""
_UNANSWERED = 2
"""For how many times `_QUIET_SECONDS` that question may stay unanswered. Then the channel counts as broken, at the
latest `SILENT_SECONDS` after its last byte: a firewall that drops packets, or a laptop that slept, reports no end."""
SILENT_SECONDS = _QUIET_SECONDS * (2 + _UNANSWERED)
_ASLEEP_SECONDS = 1.0  # between two tries to reach a sandbox that is paused


class Link:
    """Bound to the event loop on which it is used first."""

    def __init__(
        self,
        opener: Opener,
        *,
        key: bytes,
        on_data: Callable[[bytes], None],
        on_lost: Callable[[LowtideError], None],
        text: bool = False,
        provider: str,
        sandbox_id: str,
        bound_seconds: float = BOUND_SECONDS,
        busy: Callable[[], bool] = lambda: True,
        question: bytes = b"",
    ) -> None:
        """`busy`: whether somebody waits for what is still to come. `question`: what the program answers whenever it
        is there; sent when nothing else arrives. Empty: a silent channel is not noticed."""
        self._busy, self._question = busy, question
        self._opener, self._key, self._text = opener, key, text
        self._on_data, self._on_lost = on_data, on_lost
        self._context: dict[str, Any] = {"provider": provider, "sandbox_id": sandbox_id}
        self._bound_seconds = bound_seconds
        self._id = secrets.randbits(63)
        self._proof: bytes | None = None
        self._unsaid = bytearray()  # from `_taken` on: what the program has not taken yet
        self._taken = self._sent = 0
        self._received = self._told = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._welcomed = False
        self._heard = False  # since the heartbeat looked last
        self.error: LowtideError | None = None
        self.pid: int | None = None
        """Of the program, in its own pid namespace; known after the first answer."""

    def write(self, data: bytes) -> None:
        """Say it, now or when there is a channel again. Raises what ended the link."""
        if self.error is not None:
            raise self.error
        self._unsaid += data
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
        self._work.set()

    async def room(self) -> None:
        """Wait until more may be said."""
        while len(self._unsaid) >= WINDOW // 2 and self.error is None:
            self._room.clear()
            await self._room.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Whatever was said before goes out; nothing comes back."""
        channel, self._channel = self._channel, None
        if channel is not None and self._welcomed:
            self._closing = asyncio.get_running_loop().create_task(self._last_words(channel))
        elif channel is not None:
            channel.close()
        self._end(SandboxUnavailableError("the connection into the sandbox was closed", **self._context))

    def drop(self) -> None:
        """Nothing goes out any more: what it leads to is ending."""
        self._drop()
        self._end(SandboxUnavailableError("the sandbox is ending", **self._context))

    async def _last_words(self, channel: Channel) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5):
                await channel.send(self._packets())
        channel.close()

    def _end(self, error: LowtideError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._running is not None and self._running is not asyncio.current_task():
            self._running.cancel()
        self._room.set()
        self._on_lost(error)

    # -- channels come and go

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        broken_since: float | None = None
        pause = 0.01
        while self.error is None:
            failure: Exception | None = None
            progress, opened = (self._taken, self._received), loop.time()
            try:
                await self._connect()
                await self._carry()
            except Asleep as error:
                failure = error
                if self._proof is None:
                    break
                broken_since = None  # it is resumed or destroyed some day: its commands wait with it
                await asyncio.sleep(_ASLEEP_SECONDS)
                continue
            except LowtideError as error:
                failure = error
                if self._proof is None or not _passing(error):
                    break
            except (OSError, EOFError, TimeoutError) as error:
                failure = error
                if isinstance(error, Spent) and self._at_rest:
                    break
            except Exception as error:  # a defect on the way there: said, not waited for
                failure = error
                break
            lasted = loop.time() - opened > 1 and not isinstance(failure, _Silent)
            if self._welcomed and (progress != (self._taken, self._received) or lasted):
                broken_since, pause = None, 0.01  # one that only greets is as broken as one that does not
            self._drop()
            if self._proof is None or self.error is not None:
                break
            broken_since = broken_since if broken_since is not None else loop.time()
            if loop.time() - broken_since > self._bound_seconds:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)
        self._drop()
        if self.error is not None:
            return
        if isinstance(failure, LowtideError) and (self._proof is None or not _passing(failure)):
            self._end(failure)
            return
        late = broken_since is not None and loop.time() - broken_since > self._bound_seconds
        words = (
            f"the connection into the sandbox was broken for more than {self._bound_seconds:.0f} seconds"
            if late
            else "the connection into the sandbox broke"
        )
        # A timeout has no words of its own.
        why = str(failure or "it ended") or f"no answer from inside within {_GREETING_SECONDS:g} seconds"
        broken = SandboxUnavailableError(f"{words}: {why}", **self._context)
        broken.__cause__ = failure
        self._end(broken)

    @property
    def _at_rest(self) -> bool:
        return self._welcomed and not self._busy() and self._sent - self._taken == len(self._unsaid)

    async def _connect(self) -> None:
        again = self._proof is not None
        greeting = GREETING.pack(MAGIC, self._key, self._id, again, self._received)
        first = self._wire(HEAD.pack(len(greeting) + 16, 0, 0) + greeting)
        if not again:  # the first command goes along; after a break the answer says where to go on
            self._sent = 0
            first += self._packets()
        self._work.clear()
        async with asyncio.timeout(self._greeting_seconds):
            self._channel = await self._opener(first)

    @property
    def _greeting_seconds(self) -> float:
        """For one try. After a break there is time for several within the bound: one of them may meet a connection
        that is as silent as the last one."""
        if self._proof is None:
            return _GREETING_SECONDS
        return min(_GREETING_SECONDS, max(1.0, self._bound_seconds / 3))

    async def _carry(self) -> None:
        """Until the channel breaks, or is silent though the program was asked."""
        channel = self._channel
        assert channel is not None
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        tasks = [loop.create_task(self._talk(channel)), loop.create_task(self._beat(limit))]
        try:
            async with limit:
                await self._listen(channel)
        except TimeoutError as error:
            if not limit.expired():
                raise
            words = (
                f"nothing arrived for {_QUIET_SECONDS * _UNANSWERED:g} seconds though the program was asked"
            )
            raise _Silent(words) from error
        finally:
            for task in tasks:
                task.cancel()
            # Not `await task`: its cancellation and ours would look alike, and a loop that ends cancels once.
            await asyncio.wait(tasks)

    async def _beat(self, limit: asyncio.Timeout) -> None:
        """Ask when nothing has arrived, and give the channel up when no answer does. Counted in looks and not by the
        clock: a process that was stopped for an hour has not waited for an answer."""
        quiet = 0
        while self._question:
            await asyncio.sleep(_QUIET_SECONDS)
            quiet = 0 if self._heard or not self._welcomed or not self._busy() else quiet + 1
            self._heard = False
            if quiet == 1 and self.error is None:
                self.write(self._question)
            elif quiet > _UNANSWERED:
                limit.reschedule(asyncio.get_running_loop().time())
                return

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        self._welcomed = False
        if channel is not None:
            channel.close()

    async def _talk(self, channel: Channel) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                if self._welcomed and (packets := self._packets()):
                    await channel.send(packets)
        except (OSError, LowtideError):
            channel.close()  # the listening side sees its end

    def _packets(self) -> bytes:
        """Everything that has not been sent over this channel, and what we have taken: alone, once that is much."""
        parts: list[bytes] = []
        while True:
            at = self._sent - self._taken
            piece = bytes(self._unsaid[at : min(at + PACKET, WINDOW)])
            if not piece and (parts or self._received - self._told < _TOLD):
                return b"".join(parts)
            parts.append(self._wire(HEAD.pack(len(piece) + 16, self._sent, self._received) + piece))
            self._told = self._received
            self._sent += len(piece)

    def _wire(self, packet: bytes) -> bytes:
        return b"~" + base64.b64encode(packet) + b"\n" if self._text else packet

    # -- what comes

    async def _listen(self, channel: Channel) -> None:
        buffer = bytearray()
        greeted = asyncio.get_running_loop().time() + self._greeting_seconds
        while True:
            if self._welcomed:
                data = await channel.receive()
            else:
                async with asyncio.timeout_at(greeted):  # whatever else it says meanwhile
                    data = await channel.receive()
            if not data:
                raise EOFError(_noise(buffer) or "it ended")
            self._heard = True
            buffer += data
            if self._text:
                self._lines(buffer)
            else:
                self._binary(buffer)
            # A channel that always has more to say (hostile code writes to gVisor's) must not keep everybody else waiting.
            await asyncio.sleep(0)

    def _lines(self, buffer: bytearray) -> None:
        *lines, rest = bytes(buffer).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise self._hostile("a line without an end")
        for line in lines:
            if line.startswith(b"~"):  # anything else is what a shell or a terminal adds
                try:
                    packet = base64.b64decode(line[1:].rstrip(b"\r"), validate=True)
                except binascii.Error:
                    raise self._hostile("a line that is not base64") from None
                if len(packet) < HEAD.size or len(packet) - 4 != int.from_bytes(packet[:4], "little"):
                    raise self._hostile("a packet of a wrong length")
                self._packet(memoryview(packet))
        buffer[:] = rest

    def _binary(self, buffer: bytearray) -> None:
        data = bytes(buffer)
        at, size = 0, len(data)
        while size - at >= HEAD.size:
            length = int.from_bytes(data[at : at + 4], "little")
            if not 16 <= length <= PACKET + 16:
                if self._proof is not None and not self._welcomed:
                    # The engine's own words where the program should answer: mostly that the sandbox is ending.
                    raise EOFError(_noise(buffer) or "what answered was not lowtide's program")
                said = _noise(buffer)
                raise self._hostile("a packet of a wrong length" + (f": {said}" if said else ""))
            if size - at - 4 < length:
                break
            self._packet(memoryview(data)[at : at + 4 + length])
            at += 4 + length
        del buffer[:at]

    def _packet(self, packet: memoryview) -> None:
        _, offset, taken = HEAD.unpack_from(packet)
        payload = packet[HEAD.size :]
        if not self._welcomed:
            self._greeted(bytes(payload))
            return
        self._advance(taken)
        had = self._received - offset
        if had < 0:
            raise self._hostile("bytes are missing")
        fresh = bytes(payload[had:])
        if fresh:
            self._received += len(fresh)
            self._on_data(fresh)
            if self._received - self._told >= _TOLD:
                self._work.set()

    def _advance(self, taken: int) -> None:
        if taken > self._sent:
            raise self._hostile("it has taken what was never sent")
        if taken > self._taken:
            del self._unsaid[: taken - self._taken]
            self._taken = taken
            self._room.set()
            if self._sent - taken < len(self._unsaid):
                self._work.set()

    def _greeted(self, payload: bytes) -> None:
        if len(payload) != WELCOME.size or not payload.startswith(MAGIC):
            raise self._hostile("not a greeting")
        _, proof, stored, status, pid = WELCOME.unpack(payload)
        if status == FORGOTTEN:
            raise SandboxUnavailableError(
                "what ran the commands inside is not there any more: something in the sandbox has ended it, or the "
                "connection was broken for too long. What they said meanwhile is lost: start them again",
                retryable=False,
                **self._context,
            )
        if status not in (NEW, AGAIN):
            raise SandboxUnavailableError(
                "the program inside does not know this sandbox's key", retryable=False, **self._context
            )
        if self._proof is not None and proof != self._proof:
            # Whoever answers is not the one that runs our commands: believing it would let them be forged.
            raise self._hostile("another program answers in its place")
        if not self._taken <= stored <= self._taken + len(self._unsaid):
            raise self._hostile("it has what was never sent")
        if self._proof is not None:
            self._sent = stored
        self._proof, self.pid = proof, pid
        self._welcomed = True
        self._work.set()

    def _hostile(self, words: str) -> LowtideError:
        return SandboxUnavailableError(
            f"what answers in the sandbox is not lowtide's program: {words}",
            retryable=False,
            **self._context,
        )


class _Silent(TimeoutError):
    """The channel is open and carries nothing."""


def _passing(error: LowtideError) -> bool:
    """Whether another try may go well."""
    return isinstance(error, ResourceExhaustedError | RequestTimeoutError) or (
        isinstance(error, SandboxUnavailableError) and error.retryable
    )


def _noise(buffer: bytearray) -> str:
    text = bytes(buffer[:200]).decode("utf-8", "replace").strip()
    return text if text.isprintable() else ""
