"""One command in a sandbox, over envd's process stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import tagged
from lowtide.providers.base import STDERR, STDOUT, ProcessSpec, TerminalSize
from lowtide.providers.e2b import script
from lowtide.providers.e2b.deadline import within
from lowtide.providers.e2b.envd import alone, closed, events_of, exit_code, started
from lowtide.providers.e2b.failures import translated
from lowtide.providers.e2b.leaving import track
from lowtide.providers.e2b.marks import MarkedStream

if TYPE_CHECKING:
    from lowtide.providers.e2b.sdk import LazySandbox

START_SECONDS = 60.0
_CALL_SECONDS = 30.0
_SILENT_SECONDS = 180.0
"""envd says something every 50 seconds. After this long without a word the connection is dead."""
_QUEUE_CHUNKS = 256
_STDIN_BYTES = 256 << 10
_CLOSING_SECONDS = 0.5
"""How long a command's stream may go on after its end, so that its connection can be used again."""

_closing: set[asyncio.Task[None]] = set()

Explain = Callable[[errors.LowtideError], Awaitable[errors.LowtideError]]
"""What an error of the way to the sandbox really means: mostly that the sandbox is gone."""


class E2BProcess:
    """A `ProcessHandle`."""

    def __init__(
        self,
        box: LazySandbox,
        events: AsyncGenerator[Any, Any],
        *,
        wrapping: script.Wrapping,
        tty: bool,
        user: str | None,
        explain: Explain,
    ) -> None:
        self._box, self._events, self._pid, self._user = box, events, 0, user
        self._wrapping, self._tty, self._explain = wrapping, tty, explain
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._chunks: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(_QUEUE_CHUNKS)
        self._started: asyncio.Future[None] = loop.create_future()
        self._code: asyncio.Future[int] = loop.create_future()
        self._code.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        mark = wrapping.mark.encode()
        self._streams = {STDOUT: MarkedStream(mark), STDERR: MarkedStream(mark)}
        self._input_closed = False
        self._heard = loop.time()
        self._pump = loop.create_task(self._run())
        track(self._pump)
        self._watch = loop.call_later(START_SECONDS, self._give_up_start)

    @classmethod
    async def start(
        cls,
        box: LazySandbox,
        spec: ProcessSpec,
        *,
        user: str | None,
        working_dir: str | None,
        explain: Explain,
    ) -> E2BProcess:
        """Returns when envd has started it. Raises what the SDK raises."""
        wrapping = script.Wrapping()
        environment = dict(spec.environment)
        if spec.tty is not None:
            environment.setdefault("TERM", "xterm-256color")
        user = spec.user or user
        events = events_of(
            box,
            wrapping.command(spec, working_dir),
            environment=environment,
            user=user,
            stdin=spec.stdin,
            tty=spec.tty,
        )
        process = cls(box, events, wrapping=wrapping, tty=spec.tty is not None, user=user, explain=explain)
        try:
            await process._started
        except BaseException:
            process._watch.cancel()
            process._pump.cancel()
            raise
        return process

    # The handle

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        if self._code.done() and (error := self._code.exception()) is not None:
            raise error

    async def wait(self) -> int:
        return self._code.result() if self._code.done() else await asyncio.shield(self._code)

    async def write_stdin(self, data: bytes) -> None:
        for start in range(0, len(data), _STDIN_BYTES):
            if self._code.done() or self._input_closed:
                raise BrokenPipeError("the command has closed its standard input or ended")
            piece = data[start : start + _STDIN_BYTES]
            send = self._box.pty.send_stdin if self._tty else self._box.commands.send_stdin
            await self._until_ended(send(self._pid, piece, request_timeout=0))

    async def close_stdin(self) -> None:
        if self._input_closed or self._code.done():
            return
        self._input_closed = True
        with contextlib.suppress(BrokenPipeError):
            if self._tty:
                await self._until_ended(self._box.pty.send_stdin(self._pid, b"\x04"))
            else:
                await self._until_ended(self._box.commands.close_stdin(self._pid))

    async def resize(self, size: TerminalSize) -> None:
        from e2b import PtySize

        if self._tty and not self._code.done():
            with contextlib.suppress(BrokenPipeError):
                shape = PtySize(rows=size.rows, cols=size.columns)
                await self._until_ended(self._box.pty.resize(self._pid, shape))

    async def signal(self, number: int) -> None:
        if not self._code.done():
            await self._beside(script.signal(self._pid, number, self._wrapping.tag, tty=self._tty))

    async def terminate(self, grace_seconds: float) -> None:
        # Also after the command's own end: what it left running is part of its tree.
        text = tagged.terminate(self._wrapping.tag, grace_seconds)
        if await self._beside(text, seconds=grace_seconds + _CALL_SECONDS):
            raise errors.SandboxUnavailableError(
                "some processes of the command could not be killed",
                provider="e2b",
                sandbox_id=self._box.sandbox_id,
            )
        if not self._chunks.full():  # else nobody reads the output; the processes are gone all the same
            with contextlib.suppress(errors.LowtideError, TimeoutError):
                async with asyncio.timeout(5):
                    await self.wait()

    async def aclose(self) -> None:
        self._watch.cancel()
        if self._code.done() or self._pump.done():
            return  # what is left of the stream is read by itself, so that its connection is used again
        self._pump.cancel()
        await asyncio.wait({self._pump}, timeout=_CLOSING_SECONDS * 2)

    # Inside

    async def _run(self) -> None:
        try:
            self._pid = await started(self._box, self._events)
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error) if isinstance(error, Exception) else self._started.cancel()
            if not isinstance(error, Exception):
                raise
            return
        if self._started.done():  # nobody waits for it any more
            await closed(self._events)
            return
        self._started.set_result(None)
        self._watch.cancel()
        self._heard = self._loop.time()
        self._watch = self._loop.call_later(_SILENT_SECONDS, self._listen)
        try:
            await self._follow()
        except asyncio.CancelledError:
            self._fail(
                errors.SandboxUnavailableError("the connection to the command was let go", provider="e2b")
            )
            while not self._chunks.empty():
                self._chunks.get_nowait()
            self._chunks.put_nowait(None)
            await closed(self._events)
            raise
        except Exception as error:
            self._fail(await self._meaning(error))
        else:
            if not self._code.done():
                lost = errors.SandboxUnavailableError(
                    "the stream of the command ended before the command",
                    provider="e2b",
                    sandbox_id=self._box.sandbox_id,
                )
                self._fail(await self._explain(lost))
        self._watch.cancel()
        _closing.add(self._pump)
        self._pump.add_done_callback(_closing.discard)
        await self._chunks.put(None)
        # The exit code is out and read. What still comes is the end of the stream, unless a background
        # job holds it; then the connection is given up.
        with contextlib.suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(_CLOSING_SECONDS):
                async for _ in self._events:
                    pass
        await closed(self._events)

    async def _follow(self) -> None:
        """Until the exit code is known."""
        streams, chunks = self._streams, self._chunks
        async for event in self._events:
            self._heard = self._loop.time()
            payload = event.event.event if event.event is not None else None
            if payload is None:
                continue
            if payload.field == "data":
                output = payload.value.output
                if output is None:
                    continue
                if output.field == "pty":
                    await chunks.put((STDOUT, output.value))
                    continue
                stream = STDERR if output.field == "stderr" else STDOUT
                marked = streams[stream]
                if data := marked.feed(output.value):
                    await chunks.put((stream, data))
                if marked.code is not None and all(one.code is not None for one in streams.values()):
                    self._settle(marked.code)
                    return
            elif payload.field == "end":
                for stream, marked in streams.items():
                    if rest := marked.rest():
                        await chunks.put((stream, rest))
                self._settle(exit_code(payload.value))
                return

    def _settle(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    def _fail(self, error: BaseException) -> None:
        if not self._code.done():
            self._code.set_exception(error)

    async def _meaning(self, error: BaseException) -> BaseException:
        from e2b.envd.rpc import ahandle_rpc_exception_with_health

        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                check = self._box.commands._check_health
                error = await within(_CALL_SECONDS, ahandle_rpc_exception_with_health(error, check), "health")
        found = translated(error, self._box.sandbox_id)
        if found is None:
            return error
        found.__cause__ = error if found is not error else error.__cause__
        return await self._explain(found)

    async def _until_ended(self, work: Coroutine[Any, Any, Any]) -> None:
        """See a call about the command through, or give it up when the command has ended: BrokenPipeError."""
        from e2b.exceptions import NotFoundException, SandboxException

        call = asyncio.ensure_future(work)
        try:
            await asyncio.wait({call, self._code}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # it may have ended on this very piece of input: then that has arrived
                await asyncio.wait({call}, timeout=_CLOSING_SECONDS)
        finally:
            if not call.done():
                call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                call.cancel()
        if not call.done():
            raise BrokenPipeError("the command has ended")
        try:
            call.result()
        except NotFoundException as error:
            raise BrokenPipeError("the command has ended") from error
        except SandboxException as error:
            if "broken pipe" in str(error) or "closed" in str(error):
                raise BrokenPipeError("the command has closed its standard input") from error
            raise await self._meaning(error) from error
        except Exception as error:
            raise await self._meaning(error) from error

    async def _beside(self, text: str, seconds: float = _CALL_SECONDS) -> int:
        """Run a script of ours in the same sandbox. One that is gone has nothing left to signal."""
        try:
            # As root only for what the command's own user may not touch: it may have used sudo.
            for user in dict.fromkeys((self._user, "root")):
                work = alone(self._box, script.plain(text), user=user)
                code, _ = await within(seconds, work, "a signal", self._box.sandbox_id)
                if code == 0:
                    return 0
            return code
        except errors.LowtideError as error:
            meant: BaseException = await self._explain(error)
        except Exception as error:
            meant = await self._meaning(error)
        if isinstance(meant, errors.SandboxGone | errors.SandboxNotFoundError):
            return 0
        raise meant

    def _give_up_start(self) -> None:
        if not self._started.done():
            self._started.set_exception(
                errors.RequestTimeoutError(
                    f"E2B did not answer within {START_SECONDS:g} s: start a command",
                    provider="e2b",
                    sandbox_id=self._box.sandbox_id,
                )
            )

    def _listen(self) -> None:
        silent = self._loop.time() - self._heard
        if silent >= _SILENT_SECONDS:
            self._pump.cancel()
        else:
            self._watch = self._loop.call_later(_SILENT_SECONDS - silent, self._listen)


async def all_closed() -> None:
    """Until the streams of ended commands on this loop have come to their end."""
    loop = asyncio.get_running_loop()
    ending = {stream for stream in _closing if stream.get_loop() is loop}
    if ending:
        await asyncio.wait(ending, timeout=_CLOSING_SECONDS * 2)
