"""A persistent shell over a provider's terminal: the core's state machine, driven from this end."""

from __future__ import annotations

import asyncio
import codecs
import secrets
import signal
from collections.abc import Callable

from lowtide.actionserver.shell import COLUMNS, ENVIRONMENT, KEYS, ROWS, START_SECONDS, Outcome, Shell
from lowtide.errors import LowtideError, SandboxFailedError
from lowtide.providers.base import ProcessHandle, ProcessSpec, TerminalSize
from lowtide.sandbox import Sandbox

Listener = Callable[[str], None]


class DirectShell:
    """One session. Everything runs on the engine's loop."""

    def __init__(self, sandbox: Sandbox, directory: str, cwd: str) -> None:
        self._sandbox = sandbox
        self.shell = Shell(directory, secrets.token_hex(12), cwd)
        self._handle: ProcessHandle | None = None
        self._reading: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._listener: Listener | None = None
        self._reader = self._waiting = 0
        self._closed = False
        self._error: LowtideError | None = None
        self._listener_error: Exception | None = None

    async def start(self) -> None:
        provider, sandbox_id = await self._sandbox._life.ready()
        await self._sandbox.write_file(f"{self.shell.directory}/rc", self.shell.rc())
        spec = ProcessSpec(
            argv=tuple(self.shell.argv()),
            environment=ENVIRONMENT,
            stdin=True,
            tty=TerminalSize(columns=COLUMNS, rows=ROWS),
        )
        self._handle = await provider.start_process(sandbox_id, spec)
        self._reading = asyncio.get_running_loop().create_task(self._read(self._handle))
        await self._until(
            lambda: self.shell.at_prompt or self._closed or self._error is not None, START_SECONDS
        )
        if self._error is not None:
            raise self._error
        if not self.shell.at_prompt:
            await self.aclose()
            raise SandboxFailedError(
                f"bash gave no prompt within {START_SECONDS:g} seconds", reason="no shell"
            )

    async def run(
        self, command: str, soft: float | None, hard: float | None, listener: Listener | None
    ) -> Outcome:
        now = asyncio.get_running_loop().time()
        if not self.shell.at_prompt and self.shell.command is None:
            await self._until(lambda: self.shell.at_prompt or self._error is not None, START_SECONDS)
        if self._error is not None:
            raise self._error
        if self.shell.command is not None:
            return self.shell.refused(command, now, watched=self._waiting > 0)
        content = self.shell.begin(command, now)
        try:
            await self._sandbox.write_file(f"{self.shell.directory}/command", content)
        except BaseException:
            self.shell.take_back()
            raise
        self._listener, self._listener_error = listener, None  # before the first output can come
        # Whoever asked may go away meanwhile; half a line would leave the shell waiting for its other half.
        typing = asyncio.get_running_loop().create_task(self._type_line())
        await asyncio.shield(typing)
        return await self._wait(soft, hard, listener)

    async def read_on(
        self, soft: float | None, hard: float | None, listener: Listener | None
    ) -> Outcome | None:
        return None if not self.shell.pending else await self._wait(soft, hard, listener)

    async def send(
        self, keys: str, soft: float | None, hard: float | None, listener: Listener | None
    ) -> Outcome | None:
        if not self.shell.pending:
            return None
        if self.shell.command is None:
            return await self._wait(soft, hard, listener)
        self._listener = listener
        await self._type(KEYS[keys] if keys in KEYS else keys.encode("utf-8", "surrogateescape") + b"\n")
        return await self._wait(soft, hard, listener)

    async def interrupt(self, grace_seconds: float) -> bool:
        """End the running command: Ctrl+C, then the whole shell. False when none runs."""
        if self.shell.command is None:
            return False
        await self._type(KEYS["C-c"])
        if not await self._until(lambda: self.shell.command is None, grace_seconds) and self._handle:
            self.shell.forced_exit_code = 128 + signal.SIGHUP
            await self._handle.signal(signal.SIGHUP)
            await self._until(lambda: self.shell.command is None, grace_seconds)
        return True

    async def aclose(self) -> None:
        self._closed = True
        handle, self._handle = self._handle, None
        if self._reading is not None:
            self._reading.cancel()
        if handle is not None:
            await handle.terminate(0.5)
            await handle.aclose()

    async def _type_line(self) -> None:
        try:
            await self._type(self.shell.line)
        except LowtideError as error:
            self._error = error  # the terminal is lost, and nobody knows whether it runs
            raise

    async def _type(self, data: bytes) -> None:
        if self._handle is not None:
            await self._handle.write_stdin(data)

    async def _read(self, handle: ProcessHandle) -> None:
        """Everything the terminal says, and a new bash when this one has ended."""
        try:
            await self._read_to_end(handle)
            if not self._closed:
                await self.start()
        except LowtideError as error:
            self._error = error  # for whoever waits, and for the next command
        await self._notify()

    async def _read_to_end(self, handle: ProcessHandle) -> None:
        loop = asyncio.get_running_loop()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for _, data in handle.output():
            output = self.shell.feed(data, loop.time())
            if output and self._listener is not None:
                self._hear(decoder.decode(output))
            if output or self.shell.at_prompt:
                await self._notify()
        orderly = self.shell.ended(await handle.wait(), loop.time())
        await self._notify()
        await handle.aclose()
        if self._closed:
            return
        state, restore = (f"{self.shell.directory}/{name}" for name in ("state", "restore"))
        await self._sandbox.exec(["mv", state, restore] if orderly else ["rm", "-f", restore])

    def _hear(self, said: str) -> None:
        """A listener that fails is let go, and its request is told: the terminal must be read on."""
        assert self._listener is not None
        try:
            self._listener(said)
        except Exception as error:
            self._listener, self._listener_error = None, error

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, check: Callable[[], bool], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(check)
        except TimeoutError:
            return False
        return True

    async def _wait(self, soft: float | None, hard: float | None, listener: Listener | None) -> Outcome:
        loop = asyncio.get_running_loop()
        since = loop.time()
        self._reader += 1
        mine = self._reader
        self._listener = listener
        self._waiting += 1
        try:
            while True:
                now = loop.time()
                if self._error is not None:
                    raise self._error
                if mine != self._reader:
                    return self.shell.taken_over(now)
                if self._listener_error is not None:
                    error, self._listener_error = self._listener_error, None
                    raise error
                outcome = self.shell.outcome(now, since, soft, hard)
                if outcome is not None:
                    return outcome
                due = self.shell.due(since, soft, hard)
                left = None if due is None else max(0.0, due - now)
                try:
                    async with asyncio.timeout(left), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            self._waiting -= 1
            if mine == self._reader:
                self._listener = None
