"""One command on a terminal, through the daemon's PTY."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers.base import STDOUT, ProcessSpec, TerminalSize
from lowtide.providers.daytona import script
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.inside import Explain, Inside, meaning
from lowtide.providers.daytona.sessions import START_SECONDS

if TYPE_CHECKING:
    from daytona import AsyncSandbox

_QUEUE_CHUNKS = 256
_LONGEST_HELD = 1 << 20


class DaytonaTerminal:
    """A `ProcessHandle` on a terminal: one stream, and the command in the place of the PTY's shell."""

    def __init__(self, box: AsyncSandbox, wrapping: script.Wrapping, explain: Explain) -> None:
        self._box, self._explain, self._wrapping = box, explain, wrapping
        self._inside = Inside(box, wrapping.tag, explain)
        loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_CHUNKS)
        self._code: asyncio.Future[int] = loop.create_future()
        self._code.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._ready: asyncio.Future[None] = loop.create_future()
        self._led: asyncio.Future[int] = loop.create_future()
        self._held = b""
        self._pty: Any = None
        self._waiting: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, box: AsyncSandbox, spec: ProcessSpec, *, working_dir: str | None, explain: Explain
    ) -> DaytonaTerminal:
        """Returns when the command has the terminal. Raises what the SDK raises."""
        self = cls(box, script.Wrapping(), explain)
        try:
            await within(START_SECONDS, self._start(spec, working_dir), "start a terminal", box.id)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _start(self, spec: ProcessSpec, working_dir: str | None) -> None:
        from daytona import PtySize

        size = spec.tty or TerminalSize()
        self._pty = await self._box.process.create_pty_session(
            f"lowtide-{secrets.token_hex(8)}",
            self._heard,
            pty_size=PtySize(rows=size.rows, cols=size.columns),
        )
        self._waiting = asyncio.ensure_future(self._wait())
        first, second = self._wrapping.on_terminal(spec, working_dir)
        await self._pty.send_input(first)
        await self._until(self._ready)
        await self._pty.send_input(second)
        await self._until(self._led)

    async def _until(self, step: asyncio.Future[Any]) -> None:
        await asyncio.wait({step, self._code}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done() and self._code.exception() is None:
            # It has ended on the way, as when its directory is missing: what it said is its output.
            await self._chunks.put(self._held)
            self._held = b""
        elif not step.done():
            self._code.result()

    # The handle

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        while (chunk := await self._chunks.get()) is not None:
            if chunk:
                yield STDOUT, chunk
        if self._code.done() and (error := self._code.exception()) is not None:
            raise error

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def write_stdin(self, data: bytes) -> None:
        if self._code.done():
            raise BrokenPipeError("the command has ended")
        try:
            await self._pty.send_input(data)
        except Exception as error:
            if self._code.done() or not self._pty.is_connected():
                raise BrokenPipeError("the command has ended") from error
            raise await meaning(error, self._box, self._explain) from error

    async def close_stdin(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            await self.write_stdin(b"\x04")

    async def resize(self, size: TerminalSize) -> None:
        from daytona import PtySize

        if self._code.done():
            return
        try:
            await self._pty.resize(PtySize(rows=size.rows, cols=size.columns))
        except Exception as error:
            if not self._code.done():
                raise await meaning(error, self._box, self._explain) from error

    async def signal(self, number: int) -> None:
        if not self._code.done() and self._led.done():
            await self._inside.signal(self._led.result(), number)

    async def terminate(self, grace_seconds: float) -> None:
        await self._inside.terminate(grace_seconds)
        if not self._chunks.full():
            with contextlib.suppress(errors.LowtideError, TimeoutError):
                async with asyncio.timeout(5):
                    await self.wait()

    async def aclose(self) -> None:
        if self._pty is not None:
            with contextlib.suppress(Exception):
                await self._pty.disconnect()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
            await asyncio.wait({self._waiting}, timeout=1.0)

    # Inside

    async def _heard(self, data: bytes) -> None:
        """Before the command has the terminal, all that comes is our own typing."""
        if self._led.done():
            await self._chunks.put(data)
            return
        self._held = (self._held + data)[-_LONGEST_HELD:]
        if not self._ready.done():
            _, found, after = self._held.partition(self._wrapping.ready.encode())
            if not found:
                return
            self._held = after
            self._ready.set_result(None)
        before, found, after = self._held.partition(f"{self._wrapping.mark}+".encode())
        number, end, rest = after.partition(b";")
        if found and end and number.isdigit():
            self._held = b""
            self._led.set_result(int(number))
            if before.strip() or rest:
                await self._chunks.put(before.lstrip() + rest if before.strip() else rest)

    async def _wait(self) -> None:
        try:
            ended = await self._pty.wait()
        except asyncio.CancelledError:
            self._fail(errors.SandboxUnavailableError("the terminal was let go", provider="daytona"))
            self._end()
            raise
        except Exception as error:
            self._fail(await meaning(error, self._box, self._explain))
            self._end()
            return
        if ended.exit_code is None:
            lost = errors.SandboxUnavailableError(
                f"the connection to the terminal broke: {ended.error or 'closed'}",
                provider="daytona",
                sandbox_id=self._box.id,
            )
            self._fail(await self._explain(lost))
        elif not self._code.done():
            code = int(ended.exit_code)
            self._code.set_result(code if code >= 0 else 137)
        await self._chunks.put(None)

    def _end(self) -> None:
        while self._chunks.full():
            self._chunks.get_nowait()
        self._chunks.put_nowait(None)

    def _fail(self, error: BaseException) -> None:
        if not self._code.done():
            self._code.set_exception(error)
