"""One command in a pod, over a websocket to the exec API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from lowtide import errors
from lowtide.providers import tagged
from lowtide.providers.base import STDERR, STDOUT, ProcessSpec, TerminalSize
from lowtide.providers.kubernetes import script
from lowtide.providers.kubernetes.api import Api
from lowtide.providers.kubernetes.manifest import CONTAINER
from lowtide.providers.kubernetes.marks import MarkedStream

log = logging.getLogger("lowtide.kubernetes")

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = range(5)
_CLOSE = 255  # v5 only: half-close of the channel in the next byte
# SIGHUP, SIGKILL, SIGTERM: also how a command ends whose sandbox is being taken away. That is no exit
# code of its own, so the pod is asked.
_ENDED_WITH_ITS_SANDBOX = frozenset({129, 137, 143})
_QUEUE_CHUNKS = 256
_MESSAGE_BYTES = 256 << 10
# Load balancers drop silent connections after a minute or more. The answer is not waited for: a
# server that cannot pass on our input does not answer pings either, and is well.
_PING_SECONDS = 25.0

Explain = Callable[[], Awaitable[errors.LowtideError | None]]
"""Why a command ended without a word: the sandbox is gone, or None when it is not."""


class NoShell(Exception):
    """The image has no /bin/sh. Stays inside this package."""


class PodProcess:
    """A `ProcessHandle`. With a `Wrapping` the shell around the command reports; without one the server does."""

    def __init__(
        self,
        api: Api,
        path: str,
        socket: aiohttp.ClientWebSocketResponse,
        *,
        wrapping: script.Wrapping | None,
        tty: bool,
        explain: Explain,
        sandbox_id: str,
    ) -> None:
        self._api, self._path, self._socket, self._explain = api, path, socket, explain
        self._wrapping, self._tty, self._sandbox_id = wrapping, tty, sandbox_id
        loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(_QUEUE_CHUNKS)
        self._started: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()  # a terminal that takes the line
        self._code: asyncio.Future[int] = loop.create_future()
        for future in (self._started, self._ready, self._code):
            future.add_done_callback(_retrieved)
        mark = wrapping.mark.encode() if wrapping else b"\x00"
        self._streams = {STDOUT: MarkedStream(mark), STDERR: MarkedStream(mark)}
        self._ends: dict[int, int] = {}
        self._pid: int | None = None
        self._status: str | None = None
        self._early: list[tuple[int, bytes]] = []
        self._input_closed = False
        self._input_broken = False
        self._writing = asyncio.Lock()
        self._pump = loop.create_task(self._run())
        self._pinging = loop.create_task(self._ping())

    # How one is started

    @classmethod
    async def start(
        cls, api: Api, path: str, spec: ProcessSpec, *, explain: Explain, sandbox_id: str
    ) -> PodProcess:
        """With the shell around it. Returns when the command has been started. Raises NoShell."""
        wrapping = script.Wrapping()
        tty = spec.tty is not None
        boot = wrapping.boot_tty() if tty else script.BOOT
        line = wrapping.command(spec)
        return await cls._start_wrapped(
            api, path, boot, line, wrapping, tty=tty, explain=explain, sandbox_id=sandbox_id
        )

    @classmethod
    async def start_text(
        cls, api: Api, path: str, text: str, *, explain: Explain, sandbox_id: str
    ) -> PodProcess:
        """A shell script of ours, with framed input of its own."""
        wrapping = script.Wrapping()
        line = wrapping.text(text)
        return await cls._start_wrapped(
            api, path, script.BOOT, line, wrapping, tty=False, explain=explain, sandbox_id=sandbox_id
        )

    @classmethod
    async def _start_wrapped(
        cls,
        api: Api,
        path: str,
        boot: Sequence[str],
        line: bytes,
        wrapping: script.Wrapping,
        *,
        tty: bool,
        explain: Explain,
        sandbox_id: str,
    ) -> PodProcess:
        socket = await _open(api, path, boot, stdin=True, tty=tty)
        process = cls(api, path, socket, wrapping=wrapping, tty=tty, explain=explain, sandbox_id=sandbox_id)
        try:
            if tty:
                await process._ready
            await process._send(line)
            await process._started
        except BaseException:
            await process.aclose()
            raise
        return process

    @classmethod
    async def start_bare(
        cls, api: Api, path: str, spec: ProcessSpec, *, explain: Explain, sandbox_id: str
    ) -> PodProcess:
        """As the API has it, for images without a shell: no directory, environment or signals."""
        tty = spec.tty is not None
        socket = await _open(api, path, spec.argv, stdin=spec.stdin, tty=tty)
        process = cls(api, path, socket, wrapping=None, tty=tty, explain=explain, sandbox_id=sandbox_id)
        if spec.tty is not None:
            await process.resize(spec.tty)
        return process

    # The handle

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        if self._code.done() and not self._code.cancelled():
            error = self._code.exception()
            if error is not None:
                raise error

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def write_stdin(self, data: bytes) -> None:
        if self._code.done() or self._input_closed or self._input_broken:
            raise BrokenPipeError("the command has closed its standard input or ended")
        async with self._writing:
            if self._wrapping is None or self._tty:
                await self._send(data)
                return
            for frame in script.frames(data):
                await self._send(frame)
                if self._input_broken or self._code.done():
                    raise BrokenPipeError("the command has closed its standard input or ended")

    async def close_stdin(self) -> None:
        if self._input_closed:
            return
        self._input_closed = True
        if self._code.done():
            return
        async with self._writing:
            with contextlib.suppress(BrokenPipeError):
                if self._tty:
                    await self._send(b"\x04")
                elif self._wrapping is not None:
                    await self._send(script.LAST_FRAME)
                elif self._socket.protocol == V5:
                    await self._raw(bytes([_CLOSE, _STDIN]))

    async def resize(self, size: TerminalSize) -> None:
        if not self._code.done():
            with contextlib.suppress(BrokenPipeError):
                text = json.dumps({"Width": size.columns, "Height": size.rows})
                await self._raw(bytes([_RESIZE]) + text.encode())

    async def signal(self, number: int) -> None:
        if self._code.done():
            return
        wrapping, pid = self._need_shell("signals")
        await self._beside(script.signal(pid, number, wrapping.tag))

    async def terminate(self, grace_seconds: float) -> None:
        # Also after the command's own end: what it left running is part of its tree.
        wrapping, _ = self._need_shell("signals")
        if await self._beside(tagged.terminate(wrapping.tag, grace_seconds)):
            raise errors.SandboxUnavailableError(
                "some processes of the command could not be killed",
                provider="kubernetes",
                sandbox_id=self._sandbox_id,
            )
        if not self._pump.done() and self._chunks.full():
            return  # nobody reads the output; the processes are gone all the same
        with contextlib.suppress(errors.LowtideError, TimeoutError):
            async with asyncio.timeout(5):
                await self.wait()

    async def aclose(self) -> None:
        for task in (self._pinging, self._pump):
            task.cancel()
        await asyncio.gather(self._pump, self._pinging, return_exceptions=True)
        await self._hang_up()

    # Inside

    def _need_shell(self, feature: str) -> tuple[script.Wrapping, int]:
        if self._wrapping is None or self._pid is None:
            raise errors.UnsupportedError(
                f"{feature} need a shell in the image",
                feature=feature,
                alternative="an image with /bin/sh",
                provider="kubernetes",
                sandbox_id=self._sandbox_id,
            )
        return self._wrapping, self._pid

    async def _beside(self, text: str) -> int:
        """Run a script of ours in the same container. A sandbox that is gone has nothing left to signal."""
        from lowtide.providers.kubernetes.failures import ApiError, mapped

        try:
            with mapped(self._sandbox_id):
                helper = await self.start_text(
                    self._api, self._path, text, explain=self._explain, sandbox_id=self._sandbox_id
                )
                try:
                    return await helper.wait()
                finally:
                    await helper.aclose()
        except (errors.SandboxGone, errors.SandboxNotFoundError):
            return 0
        except errors.LowtideError as error:
            if isinstance(error.__cause__, ApiError) and await self._explain() is not None:
                return 0
            raise

    async def _run(self) -> None:
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.BINARY and message.data:
                    await self._take(message.data[0], message.data[1:])
                if self._finished():
                    break
            await self._settle()
        except asyncio.CancelledError:
            self._fail(
                errors.SandboxUnavailableError(
                    "the connection to the command was let go", provider="kubernetes"
                )
            )
            while not self._chunks.empty():
                self._chunks.get_nowait()
            self._chunks.put_nowait(None)
            raise
        except Exception as error:
            self._fail(await self._lost(error))
        self._pinging.cancel()
        # The exit code is out. A reader of the output goes first; without one nothing holds the connection.
        if not self._chunks.full():
            self._chunks.put_nowait(None)
            await self._hang_up()
        else:
            await self._hang_up()
            await self._chunks.put(None)

    async def _take(self, channel: int, data: bytes) -> None:
        if channel == _ERROR:
            self._status = (self._status or "") + data.decode(errors="replace")
            return
        stream = {_STDOUT: STDOUT, _STDERR: STDERR}.get(channel)
        if stream is None or not data:
            return
        if self._wrapping is None:
            await self._chunks.put((stream, data))
            return
        if stream in self._ends:
            return  # from a background job that still holds the stream
        clean, marks = self._streams[stream].feed(data)
        for text in marks:
            self._heed(stream, text)
        if clean:
            self._early.append((stream, clean))
        # Until the shell has spoken this may be the runtime's word that there is none. The two streams
        # do not keep each other's order, so the command's own first bytes can come before that too.
        if self._pid is not None:
            early, self._early = self._early, []
            for chunk in early:
                await self._chunks.put(chunk)

    def _heed(self, stream: int, text: str) -> None:
        kind, value = text[:1], text[1:]
        if kind == "+" and value.isdigit():
            self._pid = int(value)
            _resolve(self._started)
        elif kind == "?":
            _resolve(self._ready)
        elif kind == "!":
            self._input_broken = True
        elif kind == "=" and value.isdigit():
            self._ends[stream] = int(value)

    def _finished(self) -> bool:
        if self._wrapping is None:
            return self._status is not None and _exit_code(self._status) is not None
        return STDOUT in self._ends and (self._tty or STDERR in self._ends)

    async def _settle(self) -> None:
        """The connection is over: by the marks, by the server's word, or cut."""
        if self._wrapping is not None and self._finished():
            with contextlib.suppress(BrokenPipeError):
                await self._send(self._wrapping.quit())
            ended = self._ends[STDOUT]
            gone = await self._explain() if ended in _ENDED_WITH_ITS_SANDBOX else None
            if gone is not None:
                self._fail(gone)
            elif not self._code.done():
                self._code.set_result(ended)
            return
        for number, stream in self._streams.items():
            if rest := stream.rest():
                await self._chunks.put((number, rest))
        if self._wrapping is not None and self._pid is None:
            early = b"".join(data for _, data in self._early).decode(errors="replace")
            self._status = f"{early}{self._status or ''}"
            if _no_shell(self._status):
                self._fail(NoShell(self._status))
                return
        gone = await self._explain()
        if gone is not None:
            self._fail(gone)
            return
        code = _exit_code(self._status)
        if code is not None and (self._wrapping is None or self._pid is not None):
            # The shell around the command was killed together with it: its code is the command's.
            if not self._code.done():
                self._code.set_result(code)
            return
        self._fail(await self._lost(None))

    async def _lost(self, cause: BaseException | None) -> BaseException:
        gone = None
        with contextlib.suppress(Exception):
            gone = await self._explain()
        if gone is not None:
            return gone
        detail = (self._status or "").strip()[:500] or (f"{type(cause).__name__}: {cause}" if cause else "")
        error = errors.SandboxUnavailableError(
            f"the connection to the command was cut before its end{': ' + detail if detail else ''}",
            provider="kubernetes",
            sandbox_id=self._sandbox_id,
        )
        error.__cause__ = cause
        return error

    def _fail(self, error: BaseException) -> None:
        for future in (self._started, self._ready, self._code):
            if not future.done():
                future.set_exception(error)

    async def _send(self, data: bytes) -> None:
        for start in range(0, len(data), _MESSAGE_BYTES):
            await self._raw(bytes([_STDIN]) + data[start : start + _MESSAGE_BYTES])

    async def _raw(self, message: bytes) -> None:
        try:
            await self._socket.send_bytes(message)
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            raise BrokenPipeError("the connection to the command is closed") from error

    async def _ping(self) -> None:
        while not self._socket.closed:
            await asyncio.sleep(_PING_SECONDS)
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, RuntimeError):
                await self._socket.ping()

    async def _hang_up(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, RuntimeError):
            await self._socket.close()


async def _open(
    api: Api, path: str, argv: Sequence[str], *, stdin: bool, tty: bool
) -> aiohttp.ClientWebSocketResponse:
    params = [("container", CONTAINER), ("stdout", "1")]
    if stdin:
        params.append(("stdin", "1"))
    # A terminal has one output stream; asking for two is an error.
    params.append(("tty", "1") if tty else ("stderr", "1"))
    params.extend(("command", part) for part in argv)
    return await api.websocket(f"{path}/exec", params=params, protocols=(V5, V4))


def _exit_code(status: str | None) -> int | None:
    """The exit code in the server's Status, None when it names none (an infrastructure fault)."""
    try:
        parsed = json.loads(status or "")
        if parsed.get("status") == "Success":
            return 0
        for cause in parsed["details"]["causes"]:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _no_shell(status: str | None) -> bool:
    text = (status or "").lower()
    return "/bin/sh" in text and ("no such file" in text or "not found" in text)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Mark the exception as seen: whoever waits gets it, and nobody has to."""
    if not future.cancelled():
        future.exception()
