"""The connection to one engine: aiodocker for the API, and the two kinds of stream it does not cover.

aiodocker has no half-close (a command's standard input could never end while its output is read) and
holds archives in memory, so those two go over its session or a connection of our own.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from lowtide.errors import MissingDependencyError, SandboxNotFoundError
from lowtide.providers.docker.access import Endpoint
from lowtide.providers.docker.errors import translated

if TYPE_CHECKING:
    import aiodocker
    import aiohttp

API_VERSION = "v1.41"  # Docker 20.10 and later, Podman 4 and later
HIGH_WATER = 1 << 20


class EngineClient:
    """Bound to the event loop on which it is made."""

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import aiodocker
            import aiohttp
        except ImportError as error:
            raise MissingDependencyError(
                "the docker provider needs aiodocker: pip install 'lowtide[docker]'",
                install="pip install 'lowtide[docker]'",
                provider="docker",
            ) from error
        self.endpoint = endpoint
        self.loop = asyncio.get_running_loop()
        self._ssl = endpoint.ssl_context()
        connector: aiohttp.BaseConnector
        # No cap on connections: a hundred creates at once must not wait for a hundred long answers.
        if endpoint.socket_path is not None:
            connector = aiohttp.UnixConnector(endpoint.socket_path, limit=0, keepalive_timeout=30)
            url = "unix://localhost"
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ssl=self._ssl or False)
            url = f"{'https' if self._ssl else 'http'}://{endpoint.host}:{endpoint.port}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self.docker: aiodocker.Docker = aiodocker.Docker(
            url=url, connector=connector, session=self._session, timeout=timeout, api_version=API_VERSION
        )
        self.docker.docker_host = url
        self._architecture: str | None = None
        self._base = ("http://localhost" if endpoint.local else url) + f"/{API_VERSION}/"

    async def aclose(self) -> None:
        await self.docker.close()
        await self._session.close()

    def translated(self, sandbox_id: str | None = None) -> Any:
        return translated(self.endpoint, sandbox_id)

    def container(self, sandbox_id: str) -> Any:
        return self.docker.containers.container(sandbox_id)

    async def architecture(self) -> str:
        """Of the engine's machine, as the engine calls it."""
        if self._architecture is None:
            self._architecture = str((await self.docker.version()).get("Arch", "unknown"))
        return self._architecture

    @asynccontextmanager
    async def stream(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose body, either way, is too large to hold."""
        import aiodocker

        async with self._session.request(method, self._base + path, **options) as answer:
            if answer.status >= 400:
                raise aiodocker.DockerError(answer.status, _message(await answer.read()))
            yield answer

    async def attach(self, path: str, body: dict[str, Any] | None, connection: RawStream) -> None:
        """POST, and hand the connection's both directions to `connection`."""
        if self.endpoint.socket_path is not None:
            await self.loop.create_unix_connection(lambda: connection, self.endpoint.socket_path)
        else:
            host, port = str(self.endpoint.host), self.endpoint.port or 0
            await self.loop.create_connection(lambda: connection, host, port, ssl=self._ssl)
        data = json.dumps(body).encode() if body is not None else b""
        connection.request(
            f"POST /{API_VERSION}/{path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
            f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        await connection.upgraded


def checked_id(sandbox_id: str) -> str:
    """It goes into a path of the engine's API, where `.` and `..` would lead elsewhere."""
    plain = sandbox_id.isascii() and all(c.isalnum() or c in "_.-" for c in sandbox_id)
    if not plain or not sandbox_id[:1].isalnum():
        raise SandboxNotFoundError(
            f"not a sandbox id: {sandbox_id!r}", provider="docker", sandbox_id=sandbox_id
        )
    return sandbox_id


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:2000].decode("utf-8", "replace")


_FRAME = struct.Struct(">BxxxL")


class RawStream(asyncio.Protocol):
    """One upgraded connection: frames of standard output and error in, standard input out.

    `on_data` gets (stream, bytes) as they come. Reading pauses while `held` says that too much waits.
    """

    def __init__(self, *, framed: bool = True, on_data: Callable[[int, bytes], None] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.upgraded: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        """Done when the engine has closed its side, whatever the reason."""
        self.lost: Exception | None = None
        self._framed = framed
        self._on_data = on_data or self._keep
        self._transport: asyncio.Transport | None = None
        self._head: bytearray | None = bytearray()
        self._status = 0
        self._buffer = bytearray()
        self._left = 0  # bytes of the current frame that are still to come
        self._stream = 1
        self._reading = True
        self._can_write: asyncio.Future[None] | None = None
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._waiting = 0
        self._news: asyncio.Future[None] | None = None
        self._loop = loop

    # -- reading

    async def next(self) -> tuple[int, bytes] | None:
        """The next piece when no `on_data` was given, or None at the end."""
        while not self._chunks:
            if self.closed.done():
                if self.lost is not None:
                    raise self.lost
                return None
            self._news = self._loop.create_future()
            await self._news
        chunk = self._chunks.popleft()
        self._waiting -= len(chunk[1])
        if not self._reading and self._waiting < HIGH_WATER // 2:
            self.resume_reading()
        return chunk

    def _keep(self, stream: int, data: bytes) -> None:
        self._chunks.append((stream, data))
        self._waiting += len(data)
        if self._waiting > HIGH_WATER:
            self.pause_reading()
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def pause_reading(self) -> None:
        if self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    # -- writing

    def request(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when the other side is gone."""
        if self._transport is None or self._transport.is_closing() or self.closed.done():
            raise BrokenPipeError("the command takes no more input")
        self._transport.write(data)
        if self._can_write is not None:
            await asyncio.shield(self._can_write)

    def write_eof(self) -> None:
        if (
            self._transport is not None
            and not self._transport.is_closing()
            and self._transport.can_write_eof()
        ):
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > HIGH_WATER:
                    self._reject()
                return
            words = bytes(self._head[:end]).split(b" ", 2)
            if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
                self._reject()
                return
            self._status = int(words[1])
            data = bytes(self._head[end + 4 :])
            self._head = None
            if self._status < 400:
                self.upgraded.set_result(None)
        if self._status >= 400:
            self._buffer += data  # the reason; the engine closes after it, or we do
            self._refused()
            return
        if not self._framed:
            if data:
                self._on_data(1, data)
            return
        if self._left and len(data) < self._left and not self._buffer:
            self._left -= len(data)
            self._on_data(self._stream, data)
            return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        view = bytes(self._buffer) + data if self._buffer else data
        self._buffer.clear()
        at, size = 0, len(view)
        while at < size:
            if self._left:
                piece = view[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._on_data(self._stream, piece)
            elif size - at >= 8:
                self._stream, self._left = _FRAME.unpack_from(view, at)
                at += 8
            else:
                self._buffer += view[at:]
                return

    def _reject(self) -> None:
        """What answers is no engine."""
        if not self.upgraded.done():
            self.upgraded.set_exception(
                ConnectionResetError("what answers there does not speak the engine's API")
            )
        self.close()

    def _refused(self) -> None:
        import aiodocker

        if self.upgraded.done():
            return
        try:
            json.loads(self._buffer)  # all of it is here
        except ValueError:
            if not self.closed.done():
                return
        self.upgraded.set_exception(aiodocker.DockerError(self._status, _message(bytes(self._buffer))))
        self.close()

    def pause_writing(self) -> None:
        self._can_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = error
        if not self.closed.done():
            self.closed.set_result(None)
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_exception(BrokenPipeError("the command takes no more input"))
            self._can_write.exception()
        if not self.upgraded.done():
            if self._status >= 400:
                self._refused()
            else:
                self.upgraded.set_exception(error or ConnectionResetError("the engine closed the connection"))
        self._tell()
