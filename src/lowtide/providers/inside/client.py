"""Commands over one link: starts them, carries their streams, renews the lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from lowtide.errors import LowtideError, ResourceExhaustedError, SandboxUnavailableError, ValidationError
from lowtide.providers.base import ProcessSpec
from lowtide.providers.inside import frames
from lowtide.providers.inside.channel import Opener
from lowtide.providers.inside.link import BOUND_SECONDS, Link
from lowtide.providers.inside.process import InsideProcess

_ANSWER_SECONDS = 150.0
"""Longer than a channel may be away: only a program that does not know the question is silent for so long."""


class Client:
    """One per sandbox and process of ours. It opens its channel with the first thing it has to say."""

    def __init__(
        self,
        opener: Opener,
        *,
        key: bytes,
        provider: str,
        sandbox_id: str,
        text: bool = False,
        bound_seconds: float = BOUND_SECONDS,
    ) -> None:
        self.provider, self.sandbox_id = provider, sandbox_id
        self._link = Link(
            opener,
            key=key,
            on_data=self._arrived,
            on_lost=self._lost,
            text=text,
            provider=provider,
            sandbox_id=sandbox_id,
            bound_seconds=bound_seconds,
            busy=lambda: not self.idle,
            # Renewed by 0 seconds, a lease stays as it is, and every version of the program answers that.
            question=frames.frame(frames.RENEW, 0, frames.NUMBER.pack(0)),
        )
        self._processes: dict[int, InsideProcess] = {}
        self._renewals: dict[int, asyncio.Future[int]] = {}
        self._next = 0
        self._buffer = bytearray()

    @property
    def alive(self) -> bool:
        """Whether it may still be used; a channel that is broken for the moment counts as alive."""
        return self._link.error is None

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything from it."""
        return not (self._processes or self._renewals)

    @property
    def pid(self) -> int | None:
        return self._link.pid

    def close(self, *, goodbye: bool = True) -> None:
        """Commands go on, and what they say goes nowhere. Without a goodbye: the sandbox is ending."""
        if self.alive and not goodbye:
            self._link.drop()
        elif self.alive:
            with suppress(LowtideError, RuntimeError):
                self._link.write(frames.frame(frames.BYE, 0))
            self._link.close()

    async def start(self, spec: ProcessSpec) -> InsideProcess:
        flags = (frames.WANTS_INPUT if spec.stdin else 0) | (frames.TERMINAL if spec.tty else 0)
        return await self._start(spec, flags)

    @asynccontextmanager
    async def call(self, *words: str, stdin: bool = False) -> AsyncIterator[InsideProcess]:
        """One of the program's own calls, as a command whose output is the answer."""
        spec = ProcessSpec(argv=words, stdin=stdin)
        process = await self._start(spec, frames.CALL | (frames.WANTS_INPUT if stdin else 0))
        try:
            yield process
        finally:
            if stdin:
                await process.finish_input()
            process.abandon()

    @asynccontextmanager
    async def log(self, *, follow: bool) -> AsyncIterator[InsideProcess]:
        """What the main command printed, as the output of a command: see `inside.logs`."""
        process = InsideProcess(self, self._number(), ProcessSpec(argv=("log",)))
        self._processes[process.number] = process
        try:
            self.tell(frames.LOG, process.number, frames.NUMBER.pack(follow))
            async with asyncio.timeout(_ANSWER_SECONDS):
                await process.started
            yield process
        except TimeoutError as error:
            if process.started.done():
                raise
            raise SandboxUnavailableError(
                "the sandbox does not answer when asked for its log: it may be of an older lowtide",
                provider=self.provider,
                sandbox_id=self.sandbox_id,
            ) from error
        finally:
            self._processes.pop(process.number, None)
            self.tell_if_alive(frames.FORGET, process.number)  # also tells that all has arrived

    async def renew(self, seconds: int) -> int:
        """Let the sandbox live that long from now, as far as its fixed end allows. 0: there is no clock here."""
        number = self._number()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._renewals[number] = answer
        try:
            self._link.write(frames.frame(frames.RENEW, number, frames.NUMBER.pack(seconds)))
            return await answer
        finally:
            self._renewals.pop(number, None)

    async def end_commands(self, grace_seconds: float) -> None:
        """TERM, the grace, KILL for all that this client runs. Silent about what cannot be ended."""
        running = [process.terminate(grace_seconds) for process in self._processes.values()]
        await asyncio.gather(*running, return_exceptions=True)

    async def _start(self, spec: ProcessSpec, flags: int) -> InsideProcess:
        context: dict[str, Any] = {"provider": self.provider, "sandbox_id": self.sandbox_id}
        if len(self._processes) >= frames.COMMANDS:
            raise ResourceExhaustedError(f"{frames.COMMANDS} commands run at once", **context)
        size = (spec.tty.rows, spec.tty.columns) if spec.tty else (0, 0)
        environment = dict(spec.environment)
        if spec.tty:
            environment.setdefault("TERM", "xterm-256color")
        words = [spec.cwd or "", spec.user or "", *spec.argv, *(f"{k}={v}" for k, v in environment.items())]
        data = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)
        if data.count(b"\0") != len(words):
            raise ValidationError("a command line holds no NUL", argument="command", **context)
        if len(data) > frames.LONGEST or len(spec.argv) > 60_000 or len(environment) > 8_000:
            raise ValidationError("the command line is too long", argument="command", **context)
        head = frames.START_HEAD.pack(flags, *size, len(spec.argv), len(environment))
        process = InsideProcess(self, self._number(), spec)
        self._processes[process.number] = process
        said = False
        try:
            await self._link.room()
            self.tell(frames.START, process.number, head + data)
            said = True
            await process.started
        except BaseException:
            # Given up while it was starting: nobody would ever end it.
            try:
                if said and flags == frames.CALL | frames.WANTS_INPUT:
                    await process.finish_input()
            finally:
                process.abandon()
                self._processes.pop(process.number, None)
            raise
        return process

    def _number(self) -> int:
        self._next = self._next % 0xFFFFFFFF + 1
        return self._next

    # -- for the processes

    def tell(self, kind: int, number: int, data: bytes = b"") -> None:
        self._link.write(frames.frame(kind, number, data))

    def tell_if_alive(self, kind: int, number: int, data: bytes = b"") -> None:
        if self.alive:
            self.tell(kind, number, data)

    async def room(self) -> None:
        await self._link.room()

    # -- from the link

    def _arrived(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at, size = 0, len(buffer)
        while size - at >= frames.HEAD.size:
            length, kind, number = frames.HEAD.unpack_from(buffer, at)
            if not 5 <= length <= frames.LONGEST:
                raise SandboxUnavailableError(
                    "what answers in the sandbox is not lowtide's program: a frame of a wrong length",
                    provider=self.provider,
                    sandbox_id=self.sandbox_id,
                    retryable=False,
                )
            end = at + 4 + length
            if end > size:
                break
            self._frame(kind, number, bytes(buffer[at + 9 : end]))
            at = end
        del buffer[:at]

    def _frame(self, kind: int, number: int, data: bytes) -> None:
        if kind == frames.RENEWED:
            answer = self._renewals.get(number)
            if answer is not None and not answer.done():
                answer.set_result(frames.value(data))
            return
        process = self._processes.get(number)
        if process is None:
            return
        process.take(kind, data)
        if process.over:
            self._processes.pop(number, None)

    def _lost(self, error: LowtideError) -> None:
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.fail(error)
        for answer in self._renewals.values():
            if not answer.done():
                answer.set_exception(error)
