"""The gate: one port with the CONNECT proxy, which terminates TLS for emulated hosts, and the admin endpoint."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import os
import re
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

from lowtide.emulators.admin import admin_app, refused
from lowtide.emulators.authority import Authority
from lowtide.emulators.request_check import whole_number
from lowtide.emulators.web import HEAD_SECONDS, HttpServer

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

_LONGEST_HEAD = 16_384
_MOST_UNSENT = 1 << 20
_HOST = re.compile(r"[0-9a-z._:-]{1,253}")


class Gate:
    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.authority = Authority(ground.state.directory)
        self.admin = HttpServer(admin_app(ground), refusal=refused, allow_remote=ground.settings.allow_remote)
        self.tasks: set[asyncio.Task[None]] = set()
        self.head_seconds = HEAD_SECONDS
        # A proxy that was set before us: hosts we do not stand for keep going through it.
        self.upstream = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")

    async def start(self) -> None:
        await self.admin.start()

    def connection(self) -> asyncio.Protocol:
        return _First(self)

    async def aclose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.admin.aclose()


class _First(asyncio.Protocol):
    """Reads the head of a connection: CONNECT is for the proxy, all else for the admin endpoint."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.head = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self.silent = loop.call_later(self.gate.head_seconds, self.transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self.silent.cancel()

    def data_received(self, data: bytes) -> None:
        self.head += data
        if b"\r\n\r\n" in self.head or not b"CONNECT ".startswith(self.head[:8]):
            self.silent.cancel()
        if not b"CONNECT ".startswith(self.head[:8]):
            hand_over(self.transport, cast(asyncio.Protocol, self.gate.admin.connection()), self.head)
        elif b"\r\n\r\n" in self.head:
            self.transport.pause_reading()
            task = asyncio.get_running_loop().create_task(self._connect())
            self.gate.tasks.add(task)
            task.add_done_callback(self.gate.tasks.discard)
        elif len(self.head) > _LONGEST_HEAD:
            self.transport.abort()

    async def _connect(self) -> None:
        head, _, rest = self.head.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        host, _, port = (parts[1] if len(parts) == 3 else "").rpartition(":")
        host = host.strip("[]").lower().rstrip(".")
        number = whole_number(port)
        if not (_HOST.fullmatch(host) and number is not None and 1 <= number <= 65_535):
            return self._refuse("400 Bad Request")
        if not self._allowed(lines[1:]):
            return self._refuse(
                '407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm="lowtide"'
            )
        claimed = self.gate.ground.claimed_by(host)
        try:
            if claimed is None:
                await self._tunnel(host, number, rest)
                return
            emulator, domain = claimed
            self.transport.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            loop = asyncio.get_running_loop()
            early = _Early()
            context = self.gate.authority.context(domain)
            secured = await loop.start_tls(
                self.transport, early, context, server_side=True, ssl_handshake_timeout=20
            )
            if secured is None:
                return
            hand_over(secured, cast(asyncio.Protocol, emulator.connection()), early.data)
            if early.lost:
                secured.abort()
        except (OSError, TimeoutError):
            self.transport.abort()

    def _allowed(self, lines: list[str]) -> bool:
        expected = "Basic " + base64.b64encode(f"lowtide:{self.gate.ground.proxy_token}".encode()).decode()
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == "proxy-authorization":
                return hmac.compare_digest(value.strip().encode("latin-1"), expected.encode())
        return False

    async def _tunnel(self, host: str, port: int, rest: bytes) -> None:
        """Everything that is not emulated goes where it wanted to go."""
        try:
            reader, writer = await _reach(host, port, self.gate.upstream)
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError):
            # The last three: a name that no resolver takes, a proxy's nonsense.
            return self._refuse("502 Bad Gateway")
        self.transport.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        writer.write(rest)
        pump = _Pump(writer)
        hand_over(self.transport, pump, b"")
        self.transport.resume_reading()
        try:
            while data := await reader.read(65_536):
                self.transport.write(data)
                await pump.may_write.wait()
        except OSError:
            pass
        finally:
            self.transport.close()
            writer.close()

    def _refuse(self, status: str) -> None:
        self.transport.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        self.transport.close()


def hand_over(transport: asyncio.Transport, protocol: asyncio.Protocol, data: bytes) -> None:
    """Give an open connection and what was already read from it to another protocol."""
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    if data:
        protocol.data_received(data)


class _Early(asyncio.Protocol):
    """Keeps what arrives with the end of the TLS handshake until the real protocol is there."""

    def __init__(self) -> None:
        self.data = b""
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True


class _Pump(asyncio.Protocol):
    """The caller's end of a tunnel. Neither side is read faster than the other one takes it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._draining: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.writer.write(data)
        if self._draining is None and self.writer.transport.get_write_buffer_size() > _MOST_UNSENT:
            self.transport.pause_reading()
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(OSError):
            await self.writer.drain()
        self._draining = None
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.may_write.clear()

    def resume_writing(self) -> None:
        self.may_write.set()

    def eof_received(self) -> bool:
        with contextlib.suppress(OSError):
            self.writer.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.may_write.set()
        self.writer.close()


async def _reach(
    host: str, port: int, upstream: str | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(20):
        if not upstream:
            return await asyncio.open_connection(host, port)
        via = urlsplit(upstream if "//" in upstream else f"//{upstream}")
        reader, writer = await asyncio.open_connection(via.hostname, via.port or 3128)
        head = f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n"
        if via.username:
            login = base64.b64encode(
                f"{unquote(via.username)}:{unquote(via.password or '')}".encode()
            ).decode()
            head += f"Proxy-Authorization: Basic {login}\r\n"
        writer.write(head.encode() + b"\r\n")
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200" not in answer.split(b"\r\n", 1)[0]:
            writer.close()
            raise ConnectionError("the upstream proxy refused")
        return reader, writer
