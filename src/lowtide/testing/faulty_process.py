"""A command of the faulty provider."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

from lowtide.providers.base import STDERR, STDOUT, TerminalSize


class FaultyProcess:
    """A command on this machine, in a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        queue: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

        async def pump(number: int, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(65536):
                await queue.put((number, data))
            await queue.put((number, b""))

        if self._process.stdout is None or self._process.stderr is None:
            return
        pumps = [
            asyncio.ensure_future(pump(STDOUT, self._process.stdout)),
            asyncio.ensure_future(pump(STDERR, self._process.stderr)),
        ]
        ended = 0
        while ended < len(pumps):
            number, data = await queue.get()
            if data:
                yield number, data
            else:
                ended += 1

    async def wait(self) -> int:
        code = await self._process.wait()
        return 128 - code if code < 0 else code

    async def write_stdin(self, data: bytes) -> None:
        if self._process.stdin is None or self._process.returncode is not None:
            raise BrokenPipeError
        self._process.stdin.write(data)
        try:
            await self._process.stdin.drain()
        except ConnectionResetError as error:
            raise BrokenPipeError from error

    async def close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def resize(self, size: TerminalSize) -> None:
        return None

    async def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def terminate(self, grace_seconds: float) -> None:
        await self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_seconds)
        await self.signal(signal.SIGKILL)
        await self._process.wait()

    async def aclose(self) -> None:
        return None
