"""A listener on loopback that passes connections on to a port inside a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from lowtide.errors import LowtideError
from lowtide.providers.inside.answer import Answer
from lowtide.providers.inside.client import Client
from lowtide.providers.inside.process import InsideProcess


class Forward:
    """Each connection is a call of the program inside, so that it works with no network in the sandbox,
    from any machine, and with servers that listen on the sandbox's loopback only."""

    def __init__(self, client: Callable[[], Awaitable[Client]], port: int) -> None:
        self._client, self._port = client, port
        self._connections: set[asyncio.Task[None]] = set()
        # Listening at once, so that whoever asks meanwhile gets its address, too.
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._server = asyncio.ensure_future(asyncio.start_server(self._serve, sock=listener))

    def close(self) -> None:
        if self._server.done():
            _close(self._server)
        else:
            self._server.add_done_callback(_close)
        for task in self._connections:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            client = await self._client()
            async with client.call("connect", str(self._port), stdin=True) as process:
                answer = Answer(process, f"port {self._port}")
                await answer.expect("ok")
                await _relay(reader, writer, process, answer)
        except (LowtideError, OSError, asyncio.CancelledError):
            pass  # the caller sees a closed connection, as from a port on which nobody listens
        finally:
            self._connections.discard(task)
            writer.close()


def _close(opened: asyncio.Future[asyncio.Server]) -> None:
    if not opened.cancelled():
        opened.result().close()


async def _relay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: InsideProcess, answer: Answer
) -> None:
    async def inward() -> None:
        while data := await reader.read(1 << 16):
            await process.write_stdin(data)
        await process.close_stdin()

    incoming = asyncio.ensure_future(inward())
    try:
        while data := await answer.piece():
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
    finally:
        incoming.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, LowtideError):
            await incoming
