"""One command through the engine's own exec: `ExecProcess`, for terminals and other users.

The engine's exec has no kill, tells the exit code only to who asks again, and keeps the streams open
while a background job holds them. So each command runs under our own parent process (`inside run`),
which says the exit code at the end of both streams, and which other execs find by its token.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from lowtide.errors import (
    LowtideError,
    ResourceExhaustedError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.base import STDERR, STDOUT, ProcessSpec, TerminalSize
from lowtide.providers.docker import endings, inside
from lowtide.providers.docker.client import HIGH_WATER, EngineClient, RawStream
from lowtide.providers.docker.output import Output

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider


class ExecProcess:
    """Implements `ProcessHandle`."""

    def __init__(
        self, provider: DockerProvider, client: EngineClient, sandbox_id: str, spec: ProcessSpec
    ) -> None:
        self._provider = provider
        self._client = client
        self._sandbox_id = sandbox_id
        self._spec = spec
        self._token = secrets.token_hex(16)
        self._exec: Any = None
        self._stream = RawStream(framed=spec.tty is None, on_data=self._arrived)
        mark = b"\xff" + self._token.encode()
        open_streams = (STDOUT,) if spec.tty else (STDOUT, STDERR)
        self._ends = {number: _EndMark(mark) for number in open_streams}
        self._output = Output(self._read)
        self._complaint = b""

    async def start(self) -> None:
        """Two calls: make the exec, start it and take over its streams."""
        spec = self._spec
        environment = dict(spec.environment)
        if spec.tty and "TERM" not in environment:
            environment["TERM"] = "xterm-256color"
        self._exec = await self._client.container(self._sandbox_id).exec(
            inside.run(self._token, spec),
            stdin=spec.stdin or spec.tty is not None,
            tty=spec.tty is not None,
            user=spec.user or "",
            environment=environment,
        )
        body = {"Detach": False, "Tty": spec.tty is not None}
        await self._client.attach(f"exec/{self._exec.id}/start", body, self._stream)
        self._stream.closed.add_done_callback(self._closed)

    # -- what the seam asks for

    def output(self) -> AsyncIterator[tuple[int, bytes]]:
        return self._output.chunks()

    async def wait(self) -> int:
        return await self._output.wait()

    async def write_stdin(self, data: bytes) -> None:
        if self._output.ended:
            raise BrokenPipeError("the command has ended")
        await self._stream.write(data)

    async def close_stdin(self) -> None:
        if not self._output.ended:
            self._stream.write_eof()

    async def resize(self, size: TerminalSize) -> None:
        if self._output.ended:
            return
        with contextlib.suppress(SandboxNotFoundError), self._client.translated(self._sandbox_id):
            await self._exec.resize(h=size.rows, w=size.columns)

    async def signal(self, number: int) -> None:
        await self._tell("signal", str(int(signal.Signals(number))))

    async def terminate(self, grace_seconds: float) -> None:
        await self._tell("end", str(max(0, int(grace_seconds * 1000))))
        # Whatever is still in the streams is not waited for: a reader may have stopped reading.
        self._stream.resume_reading()
        with contextlib.suppress(TimeoutError, LowtideError):
            async with asyncio.timeout(10):
                await self.wait()

    async def aclose(self) -> None:
        self._stream.close()

    # -- behind it

    async def _tell(self, *words: str) -> None:
        """Ask from another exec. A command that is only just starting is not found at first."""
        for attempt in range(20):
            if self._output.ended:
                return
            try:
                found = await self._provider.channels.ask(
                    self._sandbox_id, words[0], self._token, *words[1:], user="0"
                )
            except (SandboxGone, SandboxNotFoundError):
                return
            if found == 0:
                return
            with contextlib.suppress(TimeoutError, LowtideError):
                async with asyncio.timeout(0.05 * (attempt + 1)):
                    await self.wait()

    def _arrived(self, stream: int, data: bytes) -> None:
        end = self._ends.get(stream)
        if end is None:
            return
        text = end.feed(data)
        if text:
            if len(self._complaint) < 400:
                self._complaint += text[:400]
            self._output.put(stream, text)
            if self._output.waiting > HIGH_WATER:
                self._stream.pause_reading()
        if end.code is not None and all(e.code is not None for e in self._ends.values()):
            self._finish(end.code)

    def _read(self, _: int) -> None:
        if self._output.waiting < HIGH_WATER // 2:
            self._stream.resume_reading()

    def _finish(self, outcome: int | BaseException) -> None:
        self._output.finish(outcome)
        self._stream.close()

    def _closed(self, _: Any) -> None:
        """The stream ended without our mark: our parent process was killed, or never started."""
        if not self._output.ended:
            task = self._client.loop.create_task(self._ask())
            self._asking = task  # a task that nobody holds may be collected

    async def _ask(self) -> None:
        for stream, end in self._ends.items():
            if end.rest:
                self._output.put(stream, end.rest)
        try:
            with self._client.translated(self._sandbox_id):
                for pause in (0.01, 0.05, 0.2, 1.0, 2.0):
                    answer = await self._exec.inspect()
                    if not answer.get("Running") and answer.get("ExitCode") is not None:
                        break
                    await asyncio.sleep(pause)
                else:
                    # The stream is gone but the command runs: the engine was restarted, or the way to it broke.
                    raise SandboxUnavailableError(
                        "the connection to a running command was lost",
                        provider="docker",
                        sandbox_id=self._sandbox_id,
                    )
        except LowtideError as error:
            self._finish(await endings.explained(self._provider, self._sandbox_id, error))
            return
        code = int(answer["ExitCode"])
        codes = [end.code for end in self._ends.values() if end.code is not None]
        if codes:
            self._finish(codes[0])
        elif b"unable to find user" in self._complaint or b"no users found" in self._complaint:
            self._output.forget()
            self._finish(
                ValidationError(
                    f"the image knows no user {self._spec.user}",
                    argument="user",
                    provider="docker",
                    sandbox_id=self._sandbox_id,
                )
            )
        elif b"OCI runtime exec failed" in self._complaint or b"runc exec failed" in self._complaint:
            words = self._complaint.decode("utf-8", "replace").strip()
            self._output.forget()
            self._finish(
                ResourceExhaustedError(
                    f"the engine could not start the command: {words}",
                    provider="docker",
                    sandbox_id=self._sandbox_id,
                )
            )
        else:
            # 137 without our mark may be the whole container going away under the command.
            self._finish(await endings.ended_with(self._provider, self._sandbox_id, code))


class _EndMark:
    """Cuts our mark and the three digits after it off the end of one stream."""

    __slots__ = ("_mark", "code", "rest")

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self.code: int | None = None
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """What of `data` belongs to the command. What a background job writes after the end does not."""
        if self.code is not None:
            return b""
        if self.rest:
            data, self.rest = self.rest + data, b""
        mark = self._mark
        at = data.find(mark)
        if at < 0:
            at = data.rfind(b"\xff", max(0, len(data) - len(mark)))
            if at >= 0 and mark.startswith(data[at:]):
                self.rest = data[at:]
                return data[:at]
            return data
        end = at + len(mark)
        if len(data) < end + 3:
            self.rest = data[at:]
        else:
            digits = data[end : end + 3]
            self.code = int(digits) if digits.isdigit() else 255
        return data[:at]
