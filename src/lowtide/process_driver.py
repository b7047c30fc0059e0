"""One command from start to end, on the engine's loop; `process` holds the faces people look at."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from lowtide.errors import CommandTimeoutError, LowtideError, OutputLimitError, SandboxError, SandboxGone
from lowtide.in_background import in_background
from lowtide.stream import StreamReader

if TYPE_CHECKING:
    import asyncio

    from lowtide.providers.base import ProcessHandle, ProcessSpec, Provider

MAX_OUTPUT_BYTES = 256 << 20
GRACE_SECONDS = 2.0
"""Between TERM and KILL when a command is ended for it: by a timeout, a limit or a cancellation."""
_DRAIN_SECONDS = 10.0
"""How long after that its output may take to close before it is read no further."""
_STDIN_CHUNK = 64 << 10
_SHOWN_CHARACTERS = 400
_STDERR = 2

Place = Callable[[], Awaitable[tuple["Provider", str]]]
"""Waits until the sandbox takes commands, and says where it is."""

_Failure = type[CommandTimeoutError] | type[OutputLimitError]


class ProcessResult:
    """What a command came to. The bytes are the truth; the text is decoded when asked for.

    `returncode` is 128 + n after signal n, and -1 where the command was given up before it was known.
    `streams_open`: something else still held its output when it was read no further (``drain_seconds``).
    """

    __slots__ = (
        "_stderr",
        "_stdout",
        "command",
        "returncode",
        "stderr_bytes",
        "stdout_bytes",
        "streams_open",
    )

    def __init__(
        self,
        *,
        returncode: int,
        stdout_bytes: bytes = b"",
        stderr_bytes: bytes = b"",
        command: Sequence[str] = (),
        streams_open: bool = False,
    ) -> None:
        self.returncode = returncode
        self.streams_open = streams_open
        self.stdout_bytes = stdout_bytes
        self.stderr_bytes = stderr_bytes
        self.command = tuple(command)
        self._stdout: str | None = None
        self._stderr: str | None = None

    @property
    def stdout(self) -> str:
        """What it printed, as UTF-8; a byte that is none becomes U+FFFD."""
        if self._stdout is None:
            self._stdout = self.stdout_bytes.decode("utf-8", "replace")
        return self._stdout

    @property
    def stderr(self) -> str:
        """What it printed as errors, as UTF-8."""
        if self._stderr is None:
            self._stderr = self.stderr_bytes.decode("utf-8", "replace")
        return self._stderr

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessResult):
            return NotImplemented
        return self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def __repr__(self) -> str:
        command = repr(self.command)
        if len(command) > _SHOWN_CHARACTERS:
            command = f"{command[:_SHOWN_CHARACTERS]}… ({len(command)} characters)"
        return (
            f"ProcessResult(returncode={self.returncode}, stdout={len(self.stdout_bytes)} bytes, "
            f"stderr={len(self.stderr_bytes)} bytes, command={command})"
        )

    def _facts(self) -> tuple[Any, ...]:
        return (self.returncode, self.stdout_bytes, self.stderr_bytes, self.command, self.streams_open)


class Command:
    """Starts it, reads it to its end, ends its process tree when it must not go on."""

    def __init__(
        self,
        place: Place,
        spec: ProcessSpec,
        *,
        readers: tuple[StreamReader[Any], StreamReader[Any]],
        capture: bool = True,
        stdin: AsyncIterable[bytes] | None = None,
        timeout_seconds: float | None = None,
        max_output_bytes: int | None = None,
    ) -> None:
        self.spec = spec
        self.returncode: int | None = None
        self.context: dict[str, Any] = {}
        self._place = place
        self._readers = readers
        self._capture = capture
        self._kept: tuple[list[bytes], list[bytes]] = ([], [])
        self._sizes = [0, 0]
        self._stdin = stdin
        self._timeout_seconds = timeout_seconds
        self._limit = max_output_bytes
        self._handle: ProcessHandle | None = None
        self._opening: list[asyncio.Future[ProcessHandle]] = []
        self._over = False
        self._failure: _Failure | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._unconfirmed: str | None = None  # why nobody knows whether it has ended
        self._source_error: Exception | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._gave_up = False

    @property
    def pid(self) -> int | None:
        pid = getattr(self._handle, "pid", None)
        return pid if isinstance(pid, int) else None

    async def drive(self) -> ProcessResult:
        """The result, or the error that says why there is none."""
        try:
            provider, sandbox_id = await self._place()
            self.context = {"provider": provider.name, "sandbox_id": sandbox_id}
            await self._attend(provider, sandbox_id)
            result = ProcessResult(
                returncode=-1 if self.returncode is None else self.returncode,
                stdout_bytes=b"".join(self._kept[0]),
                stderr_bytes=b"".join(self._kept[1]),
                command=self.spec.argv,
                streams_open=bool(getattr(self._handle, "streams_open", False)),
            )
            if self._source_error is not None:
                raise self._source_error
            if self._failure is not None:
                raise self._failed(result)
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)
        return result

    async def write_stdin(self, data: bytes) -> None:
        handle = await self._opened()
        for start in range(0, len(data), _STDIN_CHUNK):
            await handle.write_stdin(data[start : start + _STDIN_CHUNK])

    async def close_stdin(self) -> None:
        if not self._over:
            await (await self._opened()).close_stdin()

    async def signal(self, number: int) -> None:
        if not self._over:
            await (await self._opened()).signal(number)

    async def terminate(self, grace_seconds: float) -> None:
        if not self._over:
            await (await self._opened()).terminate(grace_seconds)

    async def resize(self, width: int, height: int) -> None:
        from lowtide.providers.base import TerminalSize

        if not self._over:
            await (await self._opened()).resize(TerminalSize(columns=width, rows=height))

    async def _attend(self, provider: Provider, sandbox_id: str) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        deadline = None if self._timeout_seconds is None else loop.time() + self._timeout_seconds
        handle = await self._start(provider, sandbox_id)
        if handle is None:
            return
        timer = loop.call_at(deadline, self._end_tree, CommandTimeoutError) if deadline is not None else None
        feeder = loop.create_task(self._feed(handle, self._stdin)) if self._stdin is not None else None
        try:
            await self._read(handle.output())
            self.returncode = await handle.wait()
        except asyncio.CancelledError:
            if not self._gave_up:
                await _to_the_end(_abandon(handle))
                raise
            if self._task is not None:  # it was ended, but its output never closed: enough is known
                self._task.uncancel()
        except BaseException:
            in_background(_abandon(handle))
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if feeder is not None:
                feeder.cancel()
        if self._watchdog is not None:  # the reading has ended; what follows must not be given up for it
            self._watchdog.cancel()
        if self._ending is not None:
            _, waiting = await asyncio.wait({self._ending}, timeout=GRACE_SECONDS + _DRAIN_SECONDS)
            if waiting:
                self._unconfirmed = "the provider has not said that it ended"
        await handle.aclose()

    async def _start(self, provider: Provider, sandbox_id: str) -> ProcessHandle | None:
        """None when even the start took longer than the command's timeout."""
        import asyncio

        # Shielded: a start that is cancelled half-way would leave a command nobody can end.
        starting = asyncio.ensure_future(provider.start_process(sandbox_id, self.spec))
        try:
            if self._timeout_seconds is None:
                handle = await asyncio.shield(starting)
            else:
                handle = await asyncio.wait_for(asyncio.shield(starting), self._timeout_seconds)
        except asyncio.CancelledError:
            in_background(_abandon_when_started(starting))
            raise
        except TimeoutError:
            if starting.done():
                raise  # the provider's own
            in_background(_abandon_when_started(starting))
            self._failure = CommandTimeoutError
            self._unconfirmed = "it had not begun by then, and is ended when it does"
            return None
        self._handle = handle
        self._answer_waiting()
        return handle

    async def _read(self, output: AsyncIterator[tuple[int, bytes]]) -> None:
        readers, kept, sizes, limit = self._readers, self._kept, self._sizes, self._limit
        async for stream, data in output:
            which = 1 if stream == _STDERR else 0
            reader = readers[which]
            if not self._capture and (limit is None or reader.wanted):
                reader.put(data)
                # What others still print is listened to for a set time: a slow reader must not use that up.
                if not getattr(self._handle, "exited", False) or reader.buffered > MAX_OUTPUT_BYTES:
                    await reader.room()
                continue
            # Kept for the result; or for a reader that has not come yet, who is to miss nothing.
            have = sizes[which] if self._capture else reader.buffered
            if limit is not None and have + len(data) > limit:
                data = data[: max(0, limit - have)]
                self._end_tree(OutputLimitError)
            if data:
                reader.put(data)
                if self._capture:
                    sizes[which] += len(data)
                    kept[which].append(data)

    async def _feed(self, handle: ProcessHandle, chunks: AsyncIterable[bytes]) -> None:
        """All of the input. Where it comes from may fail: then the command is ended, and that is what is raised."""
        try:
            async for data in chunks:
                for start in range(0, len(data), _STDIN_CHUNK):
                    try:
                        await handle.write_stdin(data[start : start + _STDIN_CHUNK])
                    except (BrokenPipeError, LowtideError):
                        return  # it read as much as it wanted; what else went wrong shows in its output or its end
            with contextlib.suppress(BrokenPipeError, LowtideError):
                await handle.close_stdin()
        except Exception as error:
            self._source_error = error
            await _quietly(handle.terminate(GRACE_SECONDS))

    def _end_tree(self, failure: _Failure) -> None:
        """End it and let the reading go on to the last byte, which a dead tree's output soon reaches."""
        import asyncio

        if self._failure is not None or self._handle is None:
            return
        if failure is CommandTimeoutError and getattr(self._handle, "exited", False):
            return  # it was in time; only its streams are still listened to
        self._failure = failure
        loop = asyncio.get_running_loop()
        self._ending = loop.create_task(self._terminate(self._handle))
        self._watchdog = loop.call_later(GRACE_SECONDS + _DRAIN_SECONDS, self._give_up)

    async def _terminate(self, handle: ProcessHandle) -> None:
        try:
            await handle.terminate(GRACE_SECONDS)
        except SandboxGone:
            pass  # and the command with it
        except Exception as error:
            self._unconfirmed = f"{type(error).__name__}: {error}"

    def _give_up(self) -> None:
        self._gave_up = True
        if self._task is not None:
            self._task.cancel()

    def _failed(self, result: ProcessResult) -> LowtideError:
        what, ended = self.spec.argv[0], "was ended"
        if self._unconfirmed is not None:
            ended = f"may still run, stop() the sandbox to be sure ({self._unconfirmed})"
        if self._failure is OutputLimitError:
            return OutputLimitError(
                f"{what} printed more than {self._limit} bytes and {ended}: say max_output_bytes, or capture=False "
                "to read any amount from its streams",
                result=result,
                **self.context,
            )
        if self._unconfirmed is not None:
            message = f"{what} was not over after {self._timeout_seconds} seconds and {ended}"
        else:
            message = f"{what} was ended after {self._timeout_seconds} seconds"
        return CommandTimeoutError(message, result=result, **self.context)

    async def _opened(self) -> ProcessHandle:
        import asyncio

        if self._handle is None and not self._over:
            waiting: asyncio.Future[ProcessHandle] = asyncio.get_running_loop().create_future()
            self._opening.append(waiting)
            return await waiting
        if self._handle is None or self._over:
            raise BrokenPipeError("the command has ended")
        return self._handle

    def _close(self, error: BaseException | None) -> None:
        import asyncio

        self._over = True
        self._answer_waiting()

        if isinstance(error, asyncio.CancelledError):
            error = SandboxError("the command was cancelled", **self.context)
        for reader in self._readers:
            reader.end(error)

    def _answer_waiting(self) -> None:
        for waiting in self._opening:
            if waiting.done():
                continue
            if self._handle is not None and not self._over:
                waiting.set_result(self._handle)
            else:
                waiting.set_exception(BrokenPipeError("the command has ended"))
        self._opening.clear()


async def _abandon(handle: ProcessHandle) -> None:
    try:
        await _quietly(handle.terminate(GRACE_SECONDS))
    finally:
        await _quietly(handle.aclose())


async def _abandon_when_started(starting: Awaitable[ProcessHandle]) -> None:
    try:
        handle = await starting
    except Exception:
        return  # then there is nothing to end
    await _abandon(handle)


async def _quietly(work: Awaitable[None]) -> None:
    """What goes wrong here is second to the reason it is done, and the sandbox's own end covers it."""
    from lowtide import logger

    try:
        await work
    except Exception as error:
        logger.get("lowtide").warning("could not end a command: %s: %s", type(error).__name__, error)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    import asyncio

    await asyncio.shield(in_background(work))
