"""The shell behind one session: commands go in as text, and come out cut apart again.

Every command runs in the same bash, so what it exports and where it goes stays. Its output is what bash
prints until a mark that nobody else knows, on both streams; the mark carries the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import tempfile
import uuid
from typing import TYPE_CHECKING

from lowtide.emulators.daytona.answers import Refused
from lowtide.errors import LowtideError
from lowtide.providers.base import STDERR, STDOUT, ProcessHandle

if TYPE_CHECKING:
    from lowtide.emulators.daytona.machine import Machine
    from lowtide.emulators.daytona.sandbox import Sandbox

_IN_MEMORY = 1 << 20
_START = "exec 7>&1 8>&2; mkdir -m 700 -p {directory}\n"
# The input pipe is held open by the shell itself: a command that reads waits, as it does on the service.
_RUN = (
    "mkfifo {pipe} && exec 9<>{pipe}\n"
    "{{ eval {text}; }} <&9 >&7 2>&8\n"
    "__lowtide=$?; exec 9>&-; printf '%s%d\\n' {mark} $__lowtide >&7; printf '%s%d\\n' {mark} $__lowtide >&8\n"
)


class Log:
    """What a command printed, in order. Long ones go to disk."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - lives as long as its command
        self._pieces: list[tuple[int, int, int]] = []
        self._size = 0
        self.news = asyncio.Event()

    def add(self, stream: int, data: bytes) -> None:
        self._file.seek(self._size)
        self._file.write(data)
        self._pieces.append((stream, self._size, len(data)))
        self._size += len(data)
        self.wake()

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def piece(self, number: int) -> tuple[int, bytes] | None:
        if number >= len(self._pieces):
            return None
        stream, start, length = self._pieces[number]
        self._file.seek(start)
        return stream, self._file.read(length)

    def texts(self) -> dict[str, str]:
        self._file.seek(0)
        whole = self._file.read(self._size)
        streams = {STDOUT: bytearray(), STDERR: bytearray()}
        for stream, start, length in self._pieces:
            streams[stream] += whole[start : start + length]
        return {
            "output": whole.decode("utf-8", "replace"),
            "stdout": streams[STDOUT].decode("utf-8", "replace"),
            "stderr": streams[STDERR].decode("utf-8", "replace"),
        }


class Command:
    def __init__(self, text: str) -> None:
        self.command_id = str(uuid.uuid4())
        self.text = text
        self.mark = f"\x04lowtide-{secrets.token_hex(12)}:"
        self.log = Log()
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self.open_streams = {STDOUT, STDERR}

    def end(self, code: int) -> None:
        self.exit_code = code
        self.ended.set()
        self.log.wake()


class Shell:
    def __init__(self, name: str) -> None:
        self.name = name
        self.commands: dict[str, Command] = {}
        self._directory = f"/tmp/.daytona-session-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox
        self._queue: list[Command] = []
        self._handle: ProcessHandle | None = None
        self._pump: asyncio.Task[None] | None = None
        self._held = {STDOUT: b"", STDERR: b""}
        self._at = {STDOUT: 0, STDERR: 0}
        self._over = False

    async def start(self, machine: Machine, sandbox: Sandbox) -> None:
        self._handle = await machine.start(sandbox, ("/bin/bash", "--norc", "--noprofile"), stdin=True)
        self._pump = asyncio.create_task(self._read(self._handle))
        await self._write(_START.format(directory=self._directory))

    async def run(self, text: str) -> Command:
        """Hand it to the shell; it runs when those before it have ended."""
        if self._over or self._handle is None:
            raise Refused(410, f"session has ended: {self.name}", code="SESSION_ENDED")
        command = Command(text)
        self.commands[command.command_id] = command
        self._queue.append(command)
        pipe = f"{self._directory}/{command.command_id}"
        await self._write(_RUN.format(pipe=pipe, text=shlex.quote(text), mark=shlex.quote(command.mark)))
        return command

    async def _write(self, text: str) -> None:
        assert self._handle is not None
        try:
            await self._handle.write_stdin(text.encode())
        except BrokenPipeError:
            raise Refused(410, f"session has ended: {self.name}", code="SESSION_ENDED") from None

    async def send_input(self, machine: Machine, sandbox: Sandbox, command: Command, data: bytes) -> None:
        pipe = f"{self._directory}/{command.command_id}"
        # It may be waiting behind another one: its pipe is there when it begins.
        script = 'n=0; until [ -p "$1" ] || [ $n -ge 200 ]; do sleep 0.02; n=$((n+1)); done; cat > "$1"'
        await machine.run(sandbox, ("/bin/sh", "-c", script, "sh", pipe), data)

    async def _read(self, handle: ProcessHandle) -> None:
        try:
            async for stream, data in handle.output():
                self._take(stream, data)
            code = await handle.wait()
        except LowtideError:
            code = -1
        self._over = True
        for stream, rest in self._held.items():
            if rest and self._at[stream] < len(self._queue):
                self._queue[self._at[stream]].log.add(stream, rest)
        for command in self._queue:
            if not command.ended.is_set():
                command.end(code)

    def _take(self, stream: int, data: bytes) -> None:
        data = self._held[stream] + data
        self._held[stream] = b""
        while data and self._at[stream] < len(self._queue):
            command = self._queue[self._at[stream]]
            mark = command.mark.encode()
            before, found, rest = data.partition(mark)
            if found:
                number, newline, rest = rest.partition(b"\n")
                if not newline:  # the rest of the mark is on its way
                    if before:
                        command.log.add(stream, before)
                    self._held[stream] = mark + number
                    return
                if before:
                    command.log.add(stream, before)
                command.open_streams.discard(stream)
                self._at[stream] += 1
                if not command.open_streams:
                    command.end(int(number) if number.strip().isdigit() else -1)
                data = rest
                continue
            keep = _tail(data, mark)
            if len(data) > keep:
                command.log.add(stream, data[: len(data) - keep])
            self._held[stream] = data[len(data) - keep :]
            return
        # What a command left running prints after the last one ended belongs to nobody.

    async def end(self) -> None:
        """End the shell and everything it started."""
        if self._handle is not None:
            with contextlib.suppress(LowtideError):
                await self._handle.terminate(0.0)
        await self.aclose()

    async def aclose(self) -> None:
        self._over = True
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        for command in self._queue:
            command.log.wake()
        if self._handle is not None:
            await self._handle.aclose()


def _tail(data: bytes, mark: bytes) -> int:
    """How many of the last bytes could be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(data)), 0, -1):
        if mark.startswith(data[-length:]):
            return length
    return 0
