"""Ports of a sandbox: a listener on this machine's loopback for each, pumped into the sandbox's network."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from lowtide import threads
from lowtide.providers.local.files import Caller, answer

_CHUNK = 1 << 16


class Forwarder:
    """One port of one sandbox."""

    def __init__(self, inside: Caller, port: int) -> None:
        self._inside, self._port = inside, port
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._pumps:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)
        try:
            there = await self._connect()
            if there is None:
                writer.transport.abort()  # what connecting to a closed port looks like
                return
            far_reader, far_writer = await asyncio.open_connection(sock=there)
            try:
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except (Exception, asyncio.CancelledError):  # cancelled by close: the task has nothing left to do
            writer.transport.abort()
        finally:
            with contextlib.suppress(Exception):
                writer.close()

    async def _connect(self) -> socket.socket | None:
        with await self._inside("sockets", []) as reply:
            _, fds = await answer(reply, f"port {self._port}", self._inside.sandbox_id)
        loop = asyncio.get_running_loop()
        connected: socket.socket | None = None
        for fd in fds:
            sock = threads.Socket(fileno=fd)
            sock.setblocking(False)
            address = "127.0.0.1" if sock.family == socket.AF_INET else "::1"
            if connected is None:
                try:
                    await loop.sock_connect(sock, (address, self._port))
                    connected = sock
                    continue
                except OSError:
                    pass
            sock.close()
        return connected


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
