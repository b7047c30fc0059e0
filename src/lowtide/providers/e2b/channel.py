"""The way to the program inside: a process of envd's, whose output is one stream and whose input is a request each.

Through the SDK's generated client, one step below ``commands.run``: that one takes the bytes apart into text.
docs/e2b.md has what was measured, and what keeps others in the sandbox from reading along.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from lowtide import errors, logger
from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.e2b.sdk import LazySandbox, SdkSandbox
from lowtide.providers.e2b.transport import track
from lowtide.providers.inside import program

log = logger.get("lowtide.e2b")

_KEEPALIVE_SECONDS = 50
_SILENT_SECONDS = 180.0
"""envd says something every 50 seconds. After this long without a word the connection is dead."""
_SEND_SECONDS = 60.0
_ALONE_SECONDS = 30.0
_CLOSE_SECONDS = 0.5
"""How long the program may take to leave after the last word, so that the connection can be used again."""
_PIECE_BYTES = 1 << 20

_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - the second for when the disk is full

_channels: set[EnvdChannel] = set()


class _Failed(ConnectionError):
    """A line of shell in the sandbox ended, and not well."""


@dataclass(slots=True)
class Server:
    """The program as one client of ours started it: each has its own, with a key that nobody else ever learns."""

    key: bytes = field(default_factory=program.new_key, repr=False)
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    opened: bool = False


class EnvdChannel:
    """Implements `inside.Channel`."""

    def __init__(self, sandbox: LazySandbox, events: AsyncGenerator[Any, Any]) -> None:
        self._sandbox, self._events = sandbox, events
        self._reading: asyncio.Task[bytes] | None = None
        self._pid: int | None = None
        self._early = b""
        self._spoke = self._closed = False
        self._gone = asyncio.get_running_loop().create_future()
        self.code: int | None = None
        """Of the process, once it has ended."""
        self.said = b""
        """The last of what came on standard error."""
        _channels.add(self)

    async def start(self) -> None:
        """Until the process runs. Raises what the SDK raises: gone, or only out of reach, as envd's health tells."""
        from e2b.envd.rpc import ahandle_rpc_exception_with_health
        from e2b.envd.utils import extract_start_pid

        try:
            self._pid = int(extract_start_pid(await anext(self._events), "start the program inside"))
        except Exception as error:
            health = self._sandbox.commands._check_health
            raise await ahandle_rpc_exception_with_health(error, health) from error

    async def answered(self) -> None:
        """Until the program has said its first word."""
        failure = ""
        try:
            self._early = await self.receive()
        except ConnectionError as error:
            failure = str(error)
        if not self._early:
            words = failure or self.said.decode(errors="replace").strip() or f"it ended with {self.code}"
            words = f"the program inside did not answer: {words}"
            box, passing = self._sandbox.sandbox_id, self.code is None
            raise SERVICE.error(errors.SandboxUnavailableError, words, box, retryable=passing)

    async def send(self, data: bytes) -> None:
        from e2b.envd.process import process_pb
        from protobuf import Oneof

        selector = process_pb.ProcessSelector(selector=Oneof("pid", self._pid))  # type: ignore[arg-type]
        for at in range(0, len(data), _PIECE_BYTES):
            piece = process_pb.ProcessInput(input=Oneof("stdin", data[at : at + _PIECE_BYTES]))  # type: ignore[arg-type]
            request = process_pb.SendInputRequest(process=selector, input=piece)
            try:
                async with asyncio.timeout(_SEND_SECONDS):
                    await self._sandbox.process_rpc.send_input(request)
            except Exception as error:  # whatever it was: the way is opened anew, and that says what it means
                raise ConnectionError(f"input did not arrive: {error}") from error

    async def receive(self) -> bytes:
        if self._early:
            early, self._early = self._early, b""
            return early
        if self._reading is None or self._reading.done():
            if self.code is not None or self._closed:
                return b""
            self._reading = asyncio.ensure_future(self._next())
            track(self._reading)
        reading = self._reading  # a task of its own, so that `close` can end it whoever waits
        await asyncio.wait({reading}, timeout=_SILENT_SECONDS)
        if not reading.done() or reading.cancelled():
            raise ConnectionError("the stream was silent, or closed")
        if (error := reading.exception()) is not None:
            raise ConnectionError(f"the stream broke: {error}") from error
        return reading.result()

    async def _next(self) -> bytes:
        async for event in self._events:
            payload = event.event.event if event.event is not None else None
            if payload is not None and payload.field == "end":
                self.code = int(payload.value.exit_code)
                return b""
            if payload is not None and payload.field == "data" and payload.value.output is not None:
                output = payload.value.output
                if output.field == "stdout" and output.value:
                    self._spoke = True
                    return bytes(output.value)
                self.said = output.value[-1000:]
        raise EOFError("it ended before the process")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._closing = asyncio.ensure_future(self._close())
            track(self._closing)

    async def _close(self) -> None:
        """A program that was said goodbye leaves by itself. Any other is told that nobody listens any more."""
        reading = self._reading or asyncio.ensure_future(self._next())
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while self.code is None:
                    await asyncio.shield(reading)
                    reading = asyncio.ensure_future(self._next())
        reading.cancel()
        await asyncio.wait({reading})
        _ = reading.cancelled() or reading.exception()  # nobody needs to hear of it
        with contextlib.suppress(Exception):
            await self._events.aclose()
            # It may be gone, with its sandbox, or asleep.
            if self.code is None and self._spoke and self._pid is not None:
                async with asyncio.timeout(_CLOSE_SECONDS * 10):
                    await self._sandbox.commands.kill(self._pid)
        _channels.discard(self)
        self._gone.set_result(None)


async def open_channel(
    sandbox: SdkSandbox, server: Server, architecture: str, first: bytes, *, user: str | None
) -> EnvdChannel:
    """Raises what the SDK raises.

    Where nothing runs yet that could look, one request brings the program in, starts it and has the first
    command with it. Everywhere else root places it first, so that its own user can neither read nor replace it.
    """
    untouched, sandbox.untouched = sandbox.untouched, False
    if untouched:
        line = program.serve_line(architecture, server.name)
        try:
            return await _start(sandbox.sdk, server, ["/bin/sh", "-c", line], first, user=user)
        except errors.SandboxUnavailableError as error:
            if error.retryable:
                raise
            log.info("sandbox %s: the short way in failed: %s", sandbox.sdk.sandbox_id, error)
    for parent in _PLACES:
        directory = f"{parent}/.lowtide-{secrets.token_hex(8)}"  # made by root, with a name nobody knows
        try:
            await _alone(sandbox.sdk, program.place_line(architecture, directory))
            words = [f"{directory}/inside", "serve", server.name]
            return await _start(sandbox.sdk, server, words, first, user=user)
        except _Failed:
            if parent == _PLACES[-1]:
                raise
        finally:
            track(asyncio.ensure_future(_remove(sandbox.sdk, directory)))
    raise AssertionError


async def all_closed() -> None:
    """Until the channels on this loop that were closed have come to their end."""
    loop = asyncio.get_running_loop()
    ending = {channel._gone for channel in _channels if channel._gone.get_loop() is loop}
    if ending:
        await asyncio.wait(ending, timeout=_CLOSE_SECONDS * 3)


async def _start(
    sandbox: LazySandbox, server: Server, words: list[str], first: bytes, *, user: str | None
) -> EnvdChannel:
    environment = program.first_variable(first)
    channel = EnvdChannel(sandbox, _events(sandbox, words, environment, user=user))
    try:
        await channel.start()
        if not environment:
            await channel.send(first)
        await channel.answered()
    except BaseException:
        channel.close()
        raise
    server.opened = True
    return channel


def _events(
    sandbox: LazySandbox, words: list[str], environment: dict[str, str], *, user: str | None
) -> AsyncGenerator[Any, Any]:
    """The stream of a new process; nothing is sent before its first event is asked for."""
    from e2b.envd.client_async import as_stream
    from e2b.envd.process import process_pb
    from e2b.envd.utils import authentication_header

    config = process_pb.ProcessConfig(cmd=words[0], args=words[1:], envs=environment)
    headers = {
        **authentication_header(sandbox._envd_version, user),
        "Keepalive-Ping-Interval": str(_KEEPALIVE_SECONDS),
    }
    request = process_pb.StartRequest(process=config, stdin=True)
    return as_stream(sandbox.process_rpc.start(request, headers=headers))


async def _alone(sandbox: LazySandbox, line: str) -> None:
    """Run a line of shell to its end, as root."""
    channel = EnvdChannel(sandbox, _events(sandbox, ["/bin/sh", "-c", line], {}, user="root"))
    try:
        async with asyncio.timeout(_ALONE_SECONDS):
            await channel.start()
            while await channel.receive():
                pass
    finally:
        channel.close()
    if channel.code != 0:
        raise _Failed(f"the program inside has no place: {channel.said.decode(errors='replace').strip()}")


async def _remove(sandbox: LazySandbox, directory: str) -> None:
    """The place of a program that runs by now."""
    try:
        await _alone(sandbox, f"exec rm -rf -- {directory}")
    except Exception as error:
        log.info("sandbox %s: %s was not removed: %s", sandbox.sandbox_id, directory, error)
