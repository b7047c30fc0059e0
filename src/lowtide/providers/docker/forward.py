"""A listener on loopback that passes connections on to a port inside a container."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError
from lowtide.providers.docker.channel import ChannelProcess

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider


class Forward:
    """Each connection is an exec of `inside connect`, so that it works with no network in the sandbox,
    with engines on other machines, and with servers that listen on the sandbox's loopback only."""

    def __init__(self, provider: DockerProvider, sandbox_id: str, port: int) -> None:
        self._provider, self._sandbox_id, self._port = provider, sandbox_id, port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.address = ("127.0.0.1", 0)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()[:2]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with self._provider.channels.call(
                self._sandbox_id, ["connect", str(self._port)], stdin=True
            ) as stream:
                await _relay(reader, writer, stream)
        except (LowtideError, OSError, asyncio.CancelledError):
            pass  # the caller sees a closed connection, as from a port on which nobody listens
        finally:
            self._connections.discard(task)
            writer.close()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: ChannelProcess) -> None:
    async def outward() -> None:
        first = b""
        while (chunk := await stream.next()) is not None:
            if chunk[0] != 1:
                continue
            data = chunk[1]
            if first is not None and not first.startswith(b"ok\n"):
                first += data
                if not first.startswith(b"ok\n"):
                    if len(first) >= 3:
                        return
                    continue
                data = first[3:]
            if data:
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def inward() -> None:
        while data := await reader.read(1 << 16):
            await stream.write(data)
        stream.write_eof()

    incoming = asyncio.ensure_future(inward())
    try:
        await outward()
    finally:
        incoming.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await incoming
