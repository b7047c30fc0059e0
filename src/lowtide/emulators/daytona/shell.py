"""The shell behind one session: commands go in as text, and come out cut apart again.

Every command runs in the same bash, so what it exports and where it goes stays. Its output is what bash
prints until a mark that nobody else knows, on both streams; the mark carries the exit code.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import shlex
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from lowtide.emulators.daytona.answers import Refused
from lowtide.emulators.finish import finished
from lowtide.emulators.kept_output import KeptOutput
from lowtide.errors import LowtideError
from lowtide.providers.base import STDERR, STDOUT, ProcessHandle

if TYPE_CHECKING:
    from lowtide.emulators.daytona.machine import Machine
    from lowtide.emulators.daytona.sandbox import Sandbox

_MOST_PIECES, _LONGEST_PIECE = 65_536, 1 << 20
_LONGEST_LINE = 64 << 10
"""Bash reads its standard input byte by byte, a second for each megabyte; what is longer goes through a file."""
_LONGEST_CODE = 32
"""What a command prints itself after a mark that it has got hold of may be of any length."""
_FROM_FILE = '"$(cat {file}; rm -f {file})"'
_START = "exec 7>&1 8>&2; mkdir -m 700 -p {directory}\n"
# What is not waited for can be sent input: its pipe is held open by the shell itself, so it never sees an end.
_OPEN_INPUT, _NO_INPUT = "mkfifo {pipe} && exec 9<>{pipe}\n", "exec 9</dev/null\n"
_RUN = (
    "{{ eval {text}; }} <&9 >&7 2>&8\n"
    "__lowtide=$?; exec 9>&-; printf '%s%d\\n' {mark} $__lowtide >&7; printf '%s%d\\n' {mark} $__lowtide >&8\n"
)


class Log:
    """What a command printed, in order: the last of it, where it is long (`KeptOutput`)."""

    def __init__(self) -> None:
        self._kept = KeptOutput()
        self._pieces: collections.deque[tuple[int, int, int]] = collections.deque()
        self.first_piece = 0
        """Those before it are not kept any more."""
        self.news = asyncio.Event()

    def add(self, stream: int, data: bytes) -> None:
        for at in range(0, len(data), _LONGEST_PIECE):
            piece = data[at : at + _LONGEST_PIECE]
            self._pieces.append((stream, self._kept.size, len(piece)))
            self._kept.add(piece)
        while self._pieces[0][1] < self._kept.first or len(self._pieces) > _MOST_PIECES:
            self._pieces.popleft()
            self.first_piece += 1
        self.wake()

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def piece(self, number: int) -> tuple[int, bytes] | None:
        if not 0 <= number - self.first_piece < len(self._pieces):
            return None
        stream, start, length = self._pieces[number - self.first_piece]
        return stream, self._kept.read(start, length)

    def texts(self) -> dict[str, str]:
        first = self._pieces[0][1] if self._pieces else 0
        whole = self._kept.read(first, self._kept.size - first)
        streams = {STDOUT: bytearray(), STDERR: bytearray()}
        for stream, start, length in self._pieces:
            streams[stream] += whole[start - first : start - first + length]
        dropped = f"[lowtide: the first {first} bytes are not kept]\n" if first else ""
        return {
            "output": dropped + whole.decode("utf-8", "replace"),
            "stdout": dropped + streams[STDOUT].decode("utf-8", "replace"),
            "stderr": streams[STDERR].decode("utf-8", "replace"),
        }


class Command:
    def __init__(self, text: str, *, echo: bool) -> None:
        self.command_id = str(uuid.uuid4())
        self.text = text
        self.mark = f"\x04lowtide-{secrets.token_hex(12)}:"
        self.log = Log()
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self.echo = echo
        self.open_streams = {STDOUT, STDERR}
        self._lines = {STDOUT: b"", STDERR: b""}

    def take(self, stream: int, data: bytes) -> None:
        """The daemon keeps lines: what is not a line yet waits."""
        whole, newline, line = (self._lines[stream] + data).rpartition(b"\n")
        whole += newline
        if len(line) > _LONGEST_LINE:  # held, it would be copied with every piece, and have no bound
            cut = _last_character(line)
            whole, line = whole + line[:cut], line[cut:]
        self._lines[stream] = line
        if whole:
            self.log.add(stream, whole)

    def close_stream(self, stream: int) -> None:
        """The last line gets its end, whether or not it had one."""
        self.open_streams.discard(stream)
        if rest := self._lines[stream]:
            self._lines[stream] = b""
            self.log.add(stream, rest + b"\n")

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
        self._handing_over = asyncio.Lock()

    async def start(self, machine: Machine, sandbox: Sandbox) -> None:
        self._handle = await machine.start(sandbox, ("/bin/bash", "--norc", "--noprofile"), stdin=True)
        self._pump = asyncio.create_task(self._read(self._handle))
        self._agent = await machine.agent(sandbox)
        await self._write(_START.format(directory=self._directory))

    async def run(self, text: str, *, interactive: bool, echo: bool) -> Command:
        """Hand it to the shell; it runs when those before it have ended."""
        command = Command(text, echo=echo)
        # Whole and one after the other: the shell would wait for the rest of a command that is half there,
        # and each command is told from the next by the order in which they were written.
        await finished(self._hand_over(command, interactive=interactive))
        return command

    async def _hand_over(self, command: Command, *, interactive: bool) -> None:
        async with self._handing_over:
            if self._over or self._handle is None:
                raise Refused(410, f"session has ended: {self.name}", code="SESSION_ENDED")
            pipe = f"{self._directory}/{command.command_id}"
            script = (_OPEN_INPUT if interactive else _NO_INPUT) + _RUN
            if len(command.text) > _LONGEST_LINE:
                await self._agent.write_file(f"{pipe}.text", _once(command.text.encode()))
                quoted = _FROM_FILE.format(file=f"{pipe}.text")
            else:
                quoted = shlex.quote(command.text)
            self.commands[command.command_id] = command
            self._queue.append(command)
            await self._write(script.format(pipe=pipe, text=quoted, mark=shlex.quote(command.mark)))

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
        if not data.endswith(b"\n"):  # as the daemon does, for the sake of `read`
            data += b"\n"
        await machine.run(sandbox, ("/bin/sh", "-c", script, "sh", pipe), data)
        if command.echo:
            command.log.add(STDOUT, data)

    async def _read(self, handle: ProcessHandle) -> None:
        try:
            async for stream, data in handle.output():
                self._take(stream, data)
            code = await handle.wait()
        except (LowtideError, OSError):  # gone, or no room left to keep what it prints
            code = -1
        self._over = True
        for stream, rest in self._held.items():
            if rest and self._at[stream] < len(self._queue):
                self._queue[self._at[stream]].take(stream, rest)
        for command in self._queue:
            if not command.ended.is_set():
                command.close_stream(STDOUT)
                command.close_stream(STDERR)
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
                if not newline and len(number) < _LONGEST_CODE:  # the rest of the mark is on its way
                    command.take(stream, before)
                    self._held[stream] = mark + number
                    return
                command.take(stream, before)
                command.close_stream(stream)
                self._at[stream] += 1
                if not command.open_streams:
                    known = len(number) < _LONGEST_CODE and number.strip().isdigit()
                    command.end(int(number) if known else -1)
                data = rest
                continue
            keep = _tail(data, mark)
            command.take(stream, data[: len(data) - keep])
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


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _last_character(line: bytes) -> int:
    """Where it begins: a character is never cut in two, and the last line's end still has something to follow."""
    at = len(line) - 1
    while at > len(line) - 4 and line[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _tail(data: bytes, mark: bytes) -> int:
    """How many of the last bytes could be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(data)), 0, -1):
        if mark.startswith(data[-length:]):
            return length
    return 0
