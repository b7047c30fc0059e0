"""The connections of a gRPC server that binds a port of its own, as the ground's connection factory.

grpc takes no socket from outside. Each connection is passed on, byte by byte, to the server's own port, so
that it is opened, counted and dropped like every other emulator's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import cast

_MOST_UNSENT = 1 << 20


class Relay:
    """All connections to one inner port."""

    def __init__(self) -> None:
        self.port = 0
        self.open: dict[int, _Outer] = {}
        """By the number of the inner connection's own port, which is what the server sees of its peer."""

    def connection(self) -> asyncio.Protocol:
        return _Outer(self)

    def drop(self, peer: str) -> None:
        """Reset the connection of this peer, as a crashed server or a lost network does."""
        with contextlib.suppress(ValueError):
            outer = self.open.get(int(peer.rpartition(":")[2]))
            if outer is not None:
                outer.drop()

    def close(self) -> None:
        for outer in list(self.open.values()):
            outer.transport.abort()


class _Side(asyncio.Protocol):
    """One end of a connection; what it reads goes to the other."""

    transport: asyncio.Transport
    other: _Side | None = None

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_MOST_UNSENT)


class _Outer(_Side):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._reaching: asyncio.Task[None] | None = None
        self._port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._reaching = asyncio.get_running_loop().create_task(self._reach())

    async def _reach(self) -> None:
        try:
            inner_transport, inner = await asyncio.get_running_loop().create_connection(
                _Side, "127.0.0.1", self._relay.port
            )
        except OSError:
            self.transport.abort()
            return
        if self.transport.is_closing():
            inner_transport.abort()
            return
        inner.other, self.other = self, inner
        self._port = inner_transport.get_extra_info("sockname")[1]
        self._relay.open[self._port] = self
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.open.pop(self._port, None)
        super().connection_lost(error)

    def drop(self) -> None:
        found: socket.socket | None = self.transport.get_extra_info("socket")
        if found is not None:
            with contextlib.suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
