"""One command in a sandbox: started once, followed through a session's log, however often that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import STDERR, STDOUT, ProcessHandle, ProcessSpec, TerminalSize
from lowtide.providers.daytona import once, script
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import status_of, was_cut
from lowtide.providers.daytona.inside import Explain, Inside, meaning
from lowtide.providers.daytona.lines import EncodedStream
from lowtide.providers.daytona.sessions import CALL_SECONDS, Session, Sessions

if TYPE_CHECKING:
    from daytona import AsyncSandbox

log = logging.getLogger("lowtide.daytona")

_QUEUE_CHUNKS = 256
_CLOSING_SECONDS = 0.5
"""How long a log may go on after the command's end before its session counts as held by a background job."""
_BROKEN_SECONDS = 60.0
"""How long the log may be unreachable while the sandbox is there."""

_NOT_FOUND = 127


class DaytonaProcess:
    """A `ProcessHandle` without a terminal."""

    def __init__(
        self,
        box: AsyncSandbox,
        sessions: Sessions,
        session: Session,
        command_id: str,
        *,
        wrapping: script.Wrapping,
        stdin: bool,
        explain: Explain,
        otherwise: str | None = None,
        leader: int | None = None,
    ) -> None:
        self._box, self._sessions, self._session, self._command_id = box, sessions, session, command_id
        self._otherwise = otherwise
        """The same command for a sandbox without Perl, while it is not known that there is one."""
        self._explain = explain
        self._inside = Inside(box, wrapping.tag, explain)
        loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(_QUEUE_CHUNKS)
        self._code: asyncio.Future[int] = loop.create_future()
        self._code.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._led: asyncio.Future[int] = loop.create_future()
        if leader is not None:
            self._led.set_result(leader)
        self._streams = {STDOUT: EncodedStream(wrapping.mark), STDERR: EncodedStream(wrapping.mark)}
        self._input_open, self._frames = stdin, 0
        self._feeding = asyncio.Lock()
        self._pump = loop.create_task(self._run())

    @classmethod
    async def start(
        cls,
        box: AsyncSandbox,
        sessions: Sessions,
        spec: ProcessSpec,
        *,
        working_dir: str | None,
        explain: Explain,
    ) -> ProcessHandle:
        """Returns when it has been started, once, or has already ended. Raises what the SDK raises."""
        wrapping = script.Wrapping()
        if sessions.calls.usable and once.fits(spec):
            inside = Inside(box, wrapping.tag, explain)
            try:
                ran = await once.run(box, sessions.calls, wrapping, spec, working_dir)
                if isinstance(ran, once.Ended):
                    return once.EndedProcess(ran, inside.terminate)
                session, command_id = await sessions.begin(ran.follow)
            except once.NothingRan as error:
                log.info("sandbox %s: commands go through sessions: %s", box.id, error)
                sessions.calls.usable = False
                sessions.has_perl = sessions.has_perl and not isinstance(error, once.NoPerl)
            except BaseException:  # it may run, and nobody would ever hear of it
                sessions.watch(asyncio.ensure_future(_given_up(inside)))
                raise
            else:
                return cls(
                    *(box, sessions, session, command_id),
                    wrapping=wrapping,
                    stdin=False,
                    explain=explain,
                    leader=ran.leader,
                )
        pumped = sessions.has_perl
        command = (wrapping.pumped if pumped else wrapping.command)(spec, working_dir)
        session, command_id = await sessions.begin(command)
        return cls(
            *(box, sessions, session, command_id),
            wrapping=wrapping,
            stdin=spec.stdin,
            explain=explain,
            otherwise=wrapping.command(spec, working_dir) if pumped else None,
        )

    # The handle

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        if self._code.done() and (error := self._code.exception()) is not None:
            raise error

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def write_stdin(self, data: bytes) -> None:
        for start in range(0, len(data), script.FRAME_BYTES):
            if not self._input_open or self._code.done() or self._streams[STDERR].input_broken:
                raise BrokenPipeError("the command has closed its standard input or ended")
            await self._send(data[start : start + script.FRAME_BYTES])

    async def close_stdin(self) -> None:
        if not self._input_open or self._code.done():
            return
        self._input_open = False
        with contextlib.suppress(BrokenPipeError):
            await self._send(b"")

    async def resize(self, size: TerminalSize) -> None:
        return None

    async def signal(self, number: int) -> None:
        if self._code.done():
            return
        await asyncio.wait({self._led, self._code}, return_when=asyncio.FIRST_COMPLETED)
        if not self._code.done():
            await self._inside.signal(self._led.result(), number)

    async def terminate(self, grace_seconds: float) -> None:
        await self._inside.terminate(grace_seconds)
        if not self._chunks.full():  # else nobody reads the output; the processes are gone all the same
            with contextlib.suppress(errors.LowtideError, TimeoutError):
                async with asyncio.timeout(5):
                    await self.wait()

    async def aclose(self) -> None:
        if self._pump.done():
            return
        if self._code.done():
            # Its session is given back when its log ends; nobody needs to wait for that.
            self._sessions.watch(self._pump)
        else:
            self._pump.cancel()
            await asyncio.wait({self._pump}, timeout=_CLOSING_SECONDS)

    # Inside

    async def _run(self) -> None:
        try:
            await self._follow()
        except asyncio.CancelledError:
            self._fail(
                errors.SandboxUnavailableError("the connection to the command was let go", provider="daytona")
            )
            while not self._chunks.empty():
                self._chunks.get_nowait()
            self._chunks.put_nowait(None)
            raise
        except Exception as error:
            self._fail(await meaning(error, self._box, self._explain))
            await self._chunks.put(None)

    async def _follow(self) -> None:
        """Read the log until both streams have said the exit code; after a break read on where it broke."""
        loop = asyncio.get_running_loop()
        silent_since = loop.time()
        delay = 0.05
        while True:
            before = self._taken()
            following: asyncio.Future[Any] = asyncio.ensure_future(
                self._box.process.get_session_command_logs_async(
                    self._session.session_id, self._command_id, self._on_stdout, self._on_stderr
                )
            )
            try:
                either: set[asyncio.Future[Any]] = {following, self._code}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if self._code.done():
                    await self._chunks.put(None)
                    await self._let_session_go(following)
                    return
                failure = hosted.failure_of(following)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following}, timeout=1.0)
            if self._taken() > before:
                silent_since, delay = loop.time(), 0.05
            meant = None
            if failure is not None:
                meant = await meaning(failure, self._box, self._explain)
                if not was_cut(meant) and not isinstance(meant, errors.SandboxError):
                    raise meant from failure
                if isinstance(meant, errors.SandboxGone):
                    raise meant from failure
            if meant is None or isinstance(meant, errors.SandboxNotFoundError):
                # The log has ended and what stands around the command has not reported: it was killed
                # too, or could not be started for want of Perl.
                if await self._settled_without_mark():
                    return
                silent_since, delay = loop.time(), 0.05
                continue
            if loop.time() - silent_since > _BROKEN_SECONDS:
                raise meant
            log.info("sandbox %s: following a command again after: %s", self._box.id, meant)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)
            for stream in self._streams.values():
                stream.again()

    def _taken(self) -> int:
        return sum(stream.taken for stream in self._streams.values())

    async def _on_stdout(self, text: str) -> None:
        await self._heard(STDOUT, text)

    async def _on_stderr(self, text: str) -> None:
        await self._heard(STDERR, text)

    async def _heard(self, stream: int, text: str) -> None:
        encoded = self._streams[stream]
        if encoded.code is not None:
            encoded.feed(text)
            return
        data = encoded.feed(text)
        if encoded.leader is not None and not self._led.done():
            self._led.set_result(encoded.leader)
        if data:
            await self._chunks.put((stream, data))
        if encoded.code is not None and all(one.code is not None for one in self._streams.values()):
            self._settle(encoded.code)

    async def _settled_without_mark(self) -> bool:
        """False: nothing of the command has run, and it is started the other way now."""
        for stream, encoded in self._streams.items():
            if rest := encoded.rest():
                await self._chunks.put((stream, rest))
        asking = self._box.process.get_session_command(self._session.session_id, self._command_id)
        found = await within(CALL_SECONDS, asking, "the exit code", self._box.id)
        if found.exit_code is None:
            raise errors.SandboxUnavailableError(
                "the log of the command ended before the command", provider="daytona", sandbox_id=self._box.id
            )
        code = int(found.exit_code)
        if code == _NOT_FOUND and self._otherwise is not None and not self._led.done():
            self._sessions.has_perl = False
            otherwise, self._otherwise = self._otherwise, None
            self._command_id = await self._sessions.begin_in(self._session, otherwise)
            mark = self._streams[STDOUT].mark
            self._streams = {STDOUT: EncodedStream(mark), STDERR: EncodedStream(mark)}
            return False
        self._settle(code if code >= 0 else 137)
        await self._chunks.put(None)
        self._sessions.end_soon(self._session)
        return True

    async def _let_session_go(self, following: asyncio.Future[None]) -> None:
        """The exit code is out and read. When the log ends too, nothing holds the session any more."""
        if self._input_open:
            self._input_open = False
            with contextlib.suppress(Exception):
                await self._send(b"", after_end=True)
        await asyncio.wait({following}, timeout=_CLOSING_SECONDS)
        if following.done() and not following.cancelled() and following.exception() is None:
            self._sessions.give_back(self._session, logged=self._taken())

    def _settle(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    def _fail(self, error: BaseException) -> None:
        if not self._code.done():
            self._code.set_exception(error)

    async def _send(self, data: bytes, *, after_end: bool = False) -> None:
        """One frame, or the end. It has a number, so that it can be sent again when the answer was lost."""
        async with self._feeding:
            if not after_end:  # until it runs, it may still be started the other way
                await asyncio.wait({self._led, self._code}, return_when=asyncio.FIRST_COMPLETED)
                if self._code.done():
                    raise BrokenPipeError("the command has ended")
            self._frames += 1
            text = script.frame(self._frames, data) if data else script.last_frame(self._frames)
            delay = 0.05
            while True:
                sending: asyncio.Future[Any] = asyncio.ensure_future(
                    self._box.process.send_session_command_input(
                        self._session.session_id, self._command_id, text
                    )
                )
                waited: set[asyncio.Future[Any]] = {sending} if after_end else {sending, self._code}
                try:
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    if not sending.done():  # it may have ended because of this very piece: then that arrived
                        await asyncio.wait({sending}, timeout=_CLOSING_SECONDS)
                finally:
                    if not sending.done():
                        sending.add_done_callback(lambda one: one.cancelled() or one.exception())
                        sending.cancel()
                if not sending.done():
                    raise BrokenPipeError("the command has ended")
                failure = hosted.failure_of(sending)
                if failure is None:
                    return
                if status_of(failure) in (404, 409, 410) or self._code.done():
                    raise BrokenPipeError("the command has ended") from failure
                meant = await meaning(failure, self._box, self._explain)
                if not was_cut(meant) or delay > 2.0:
                    raise meant from failure
                await asyncio.sleep(delay)
                delay *= 2


async def _given_up(inside: Inside) -> None:
    with contextlib.suppress(errors.LowtideError):  # the sandbox's own end covers it
        await inside.terminate(0.0)
