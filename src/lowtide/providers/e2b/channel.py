"""The way to the program inside: a process of envd's, whose output is one stream and whose input is a request each.

Through the SDK's generated client, one step below ``commands.run``: that one takes the bytes apart into text.
docs/e2b.md has what was measured, and what keeps others in the sandbox from reading along.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from lowtide import errors
from lowtide.providers.e2b.sdk import LazySandbox, SdkSandbox
from lowtide.providers.e2b.transport import track
from lowtide.providers.inside import program

log = logging.getLogger("lowtide.e2b")

_KEEPALIVE_SECONDS = 50
_SILENT_SECONDS = 180.0
"""envd says something every 50 seconds. After this long without a word the connection is dead."""
_SEND_SECONDS = 60.0
_ALONE_SECONDS = 30.0
_CLOSE_SECONDS = 0.5
"""How long the program may take to leave after the last word, so that the connection can be used again."""
_PIECE_BYTES = 1 << 20
_FIRST_BYTES = 90_000
"""As much as fits into one variable (128 KiB) as base64."""
_QUEUE_CHUNKS = 64
_SAID_BYTES = 1000
ROOT = "root"

_channels: set[EnvdChannel] = set()


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
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(_QUEUE_CHUNKS)
        self._pid: asyncio.Future[int] = self._loop.create_future()
        self.failure: BaseException | None = None
        self._over = self._closed = False
        self._speaking: asyncio.Future[None] = self._loop.create_future()
        self.code: int | None = None
        self._heard = self._loop.time()
        self.said = b""
        """The beginning of what came on standard error."""
        self._watch = self._loop.call_later(_SILENT_SECONDS, self._listen)
        self._pump = self._loop.create_task(self._run())
        track(self._pump)
        _channels.add(self)

    async def started(self) -> int:
        """The process id, once it runs. Raises what the SDK raises."""
        return await asyncio.shield(self._pid)

    async def spoke(self) -> bool:
        """Whether the program runs, once that is known."""
        await asyncio.wait({self._pump, self._speaking}, return_when=asyncio.FIRST_COMPLETED)
        return self._speaking.done()

    async def send(self, data: bytes) -> None:
        from e2b.envd.process import process_pb
        from protobuf import Oneof

        selector = process_pb.ProcessSelector(selector=Oneof("pid", await self.started()))  # type: ignore[arg-type]
        for at in range(0, len(data), _PIECE_BYTES):
            piece = process_pb.ProcessInput(input=Oneof("stdin", data[at : at + _PIECE_BYTES]))  # type: ignore[arg-type]
            request = process_pb.SendInputRequest(process=selector, input=piece)
            try:
                async with asyncio.timeout(_SEND_SECONDS):
                    await self._sandbox.process_rpc.send_input(request)
            except Exception as error:  # whatever it was: the way is opened anew, and that says what it means
                raise ConnectionError(f"input did not arrive: {error}") from error

    async def receive(self) -> bytes:
        if self._over and self._chunks.empty():
            if self.failure is not None:
                raise ConnectionError(f"the stream broke: {self.failure}") from self.failure
            return b""
        return await self._chunks.get()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watch.cancel()
            self._closing = self._loop.create_task(self._close())
            track(self._closing)

    async def _close(self) -> None:
        """A program that was said goodbye leaves by itself. Any other is told that nobody listens any more."""
        await asyncio.wait({self._pump}, timeout=_CLOSE_SECONDS)
        self._pump.cancel()
        await asyncio.wait({self._pump}, timeout=_CLOSE_SECONDS)
        if self.code is None and self._speaking.done() and self._pid.done() and not self._pid.exception():
            with contextlib.suppress(Exception):  # it may be gone, with its sandbox, or asleep
                async with asyncio.timeout(_CLOSE_SECONDS * 10):
                    await self._sandbox.commands.kill(self._pid.result())
        _channels.discard(self)

    async def _run(self) -> None:
        try:
            await self._follow()
        except asyncio.CancelledError:
            self._fail(ConnectionError("nothing was heard"))
        except Exception as error:
            self._fail(error)
        finally:
            self._fail(ConnectionError("it ended"), only_start=True)
            self._watch.cancel()
            self._over = True
            if self._chunks.empty():
                self._chunks.put_nowait(b"")  # whoever waits looks again
            with contextlib.suppress(Exception):
                await self._events.aclose()

    async def _follow(self) -> None:
        from e2b.envd.utils import extract_start_pid

        self._pid.set_result(int(extract_start_pid(await anext(self._events), "start the program inside")))
        async for event in self._events:
            self._heard = self._loop.time()
            payload = event.event.event if event.event is not None else None
            if payload is None:
                continue
            if payload.field == "end":
                self.code = int(payload.value.exit_code)
                return
            if payload.field == "data" and payload.value.output is not None:
                output = payload.value.output
                if output.field == "stdout":
                    if not self._speaking.done():
                        self._speaking.set_result(None)
                    await self._chunks.put(output.value)
                elif output.field == "stderr" and len(self.said) < _SAID_BYTES:
                    self.said += output.value[:_SAID_BYTES]

    def _fail(self, error: BaseException, *, only_start: bool = False) -> None:
        if not self._pid.done():
            self._pid.set_exception(error)
            self._pid.exception()
        if not only_start:
            self.failure = error

    def _listen(self) -> None:
        silent = self._loop.time() - self._heard
        if silent >= _SILENT_SECONDS:
            self._pump.cancel()
        else:
            self._watch = self._loop.call_later(_SILENT_SECONDS - silent, self._listen)


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
        return await _start(sandbox.sdk, server, ["/bin/sh", "-c", line], first, user=user)
    directory = f"/tmp/.lowtide-{secrets.token_hex(8)}"  # noqa: S108 - made by root, with a name nobody knows
    channel = None
    try:
        await _alone(sandbox.sdk, program.place_line(architecture, directory), user=ROOT)
        words = [f"{directory}/inside", "serve", server.name]
        channel = await _start(sandbox.sdk, server, words, first, user=user)
        return channel
    finally:
        track(asyncio.ensure_future(_removed(sandbox.sdk, channel, directory)))


async def _start(
    sandbox: LazySandbox, server: Server, words: list[str], first: bytes, *, user: str | None
) -> EnvdChannel:
    environment = {}
    if len(first) <= _FIRST_BYTES:
        environment[program.FIRST] = base64.b64encode(first).decode("ascii")
    channel = EnvdChannel(sandbox, _events(sandbox, words, environment, user=user))
    try:
        await _understood(sandbox, channel.started())
        if not environment:
            await channel.send(first)
        if not await channel.spoke():
            raise errors.SandboxUnavailableError(
                "the program inside did not answer: "
                + (channel.said.decode(errors="replace").strip() or str(channel.failure or "it ended")),
                provider="e2b",
                sandbox_id=sandbox.sandbox_id,
                retryable=channel.code is None,
            )
    except BaseException:
        channel.close()
        raise
    server.opened = True
    return channel


async def all_closed() -> None:
    """Until the channels on this loop that were closed have come to their end."""
    loop = asyncio.get_running_loop()
    ending = {channel._pump for channel in _channels if channel._loop is loop}
    if ending:
        await asyncio.wait(ending, timeout=_CLOSE_SECONDS * 2)


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


async def _understood(sandbox: LazySandbox, starting: Any) -> Any:
    """What a failed start means: envd's health tells a sandbox that is gone from a connection that broke."""
    from e2b.envd.rpc import ahandle_rpc_exception_with_health

    try:
        return await starting
    except Exception as error:
        raise await ahandle_rpc_exception_with_health(error, sandbox.commands._check_health) from error


async def _alone(sandbox: LazySandbox, line: str, *, user: str) -> None:
    """Run a line of shell to its end."""
    channel = EnvdChannel(sandbox, _events(sandbox, ["/bin/sh", "-c", line], {}, user=user))
    try:
        await _understood(sandbox, channel.started())
        async with asyncio.timeout(_ALONE_SECONDS):
            while await channel.receive():
                pass
    finally:
        channel.close()
    if channel.code != 0:
        raise errors.SandboxUnavailableError(
            f"a line of shell ended with {channel.code}: {channel.said.decode(errors='replace')}",
            provider="e2b",
            sandbox_id=sandbox.sandbox_id,
        )


async def _removed(sandbox: LazySandbox, channel: EnvdChannel | None, directory: str) -> None:
    """The place of a program that runs by then, or never will."""
    if channel is not None:
        await channel.spoke()
    try:
        await _alone(sandbox, f"exec rm -rf -- {directory}", user=ROOT)
    except Exception as error:
        log.info("sandbox %s: %s was not removed: %s", sandbox.sandbox_id, directory, error)
