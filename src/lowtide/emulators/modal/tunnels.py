"""Tunnels: a declared port of a sandbox at an address of its own on this machine, with TLS or plain."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from modal_proto import api_pb2 as pb

from lowtide.emulators.modal.model import Box
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground


class Tunnels:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._servers: dict[str, list[asyncio.Server]] = {}
        self._relays: dict[str, set[asyncio.Task[Any]]] = {}
        self.hold: Callable[[Box], None] = lambda box: None
        self.release: Callable[[Box], None] = lambda box: None

    async def open(self, box: Box) -> None:
        """An address for each port it declared. A connection is taken before anything listens inside."""
        for one in box.definition.open_ports.ports:
            h2 = one.tunnel_type == pb.TUNNEL_TYPE_H2
            host, port = await self._listen(box, one.port, self._context(h2))
            data = pb.TunnelData(host=host, port=port, container_port=one.port)
            if one.unencrypted:
                data.unencrypted_host, data.unencrypted_port = await self._listen(box, one.port, None)
            box.tunnels.append(data)

    def _context(self, h2: bool) -> ssl.SSLContext:
        alpn = ("h2", "http/1.1") if h2 else ("http/1.1",)
        return self._ground.authority.context(self._ground.settings.host, alpn)

    async def _listen(self, box: Box, port: int, context: ssl.SSLContext | None) -> tuple[str, int]:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._relays.setdefault(box.sandbox_id, set()).add(task)
            self.hold(box)
            try:
                await self._relay(box, port, reader, writer)
            finally:
                self.release(box)
                self._relays.get(box.sandbox_id, set()).discard(task)

        server = await asyncio.start_server(connected, self._ground.settings.host, 0, ssl=context)
        self._servers.setdefault(box.sandbox_id, []).append(server)
        host, number = server.sockets[0].getsockname()[:2]
        return str(host), int(number)

    async def _relay(
        self, box: Box, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        inner_writer = None
        try:
            await box.booted.wait()
            if box.backing_id is None:
                return
            inner = urlsplit((await self._ground.backing.url(box.backing_id, port)).url)
            inner_reader, inner_writer = await asyncio.open_connection(inner.hostname, inner.port)
            await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))
        except (OSError, LowtideError):
            pass
        finally:
            for one in (writer, inner_writer):
                if one is not None:
                    one.close()

    def close(self, box: Box) -> None:
        for server in self._servers.pop(box.sandbox_id, ()):
            server.close()
        for task in self._relays.pop(box.sandbox_id, ()):
            task.cancel()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()
    else:  # TLS has no half of a connection
        with contextlib.suppress(OSError):
            sink.close()
