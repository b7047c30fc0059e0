"""The connection to one engine: aiodocker for the API, and the two kinds of stream it does not cover.

aiodocker holds archives in memory, and its own stream of an exec breaks with assertions and is closed only when
all is sent; so those two go over its session or a connection of our own.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from lowtide.errors import SandboxNotFoundError
from lowtide.providers import hosted
from lowtide.providers.docker.access import Endpoint
from lowtide.providers.docker.errors import SERVICE

if TYPE_CHECKING:
    import aiodocker
    import aiohttp

_API_VERSION = (1, 41)  # Docker 20.10 and later, Podman 4 and later; Docker 29 takes none before 1.44
HIGH_WATER = 1 << 20
_PIECE_BYTES = 64 << 10
_HEAD = struct.Struct(">BxxxL")
"""Before each piece of a process's output: which stream, how long."""


class EngineClient:
    """Bound to the event loop on which it is made."""

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import aiodocker
            import aiohttp
        except ImportError as error:
            raise hosted.missing_dependency("docker", "aiodocker") from error
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
            url=url, connector=connector, session=self._session, timeout=timeout
        )
        self.docker.docker_host = url
        self.architecture = ""
        """Of the engine's machine, as the engine calls it."""
        self._base = ("http://localhost" if endpoint.local else url) + "/"

    async def aclose(self) -> None:
        await self.docker.close()
        await self._session.close()

    def container(self, sandbox_id: str) -> Any:
        return self.docker.containers.container(sandbox_id)

    async def agree(self) -> None:
        """On a version of its API, before anything else is asked: the oldest that it and we know. Asked once."""
        if self.architecture:
            return
        base = self._base
        async with self.stream("GET", "version") as answer:
            facts = await answer.json()
        if self.architecture:  # somebody else has asked meanwhile
            return
        if not isinstance(facts, dict):
            raise _no_engine()
        version = max(_API_VERSION, _numbers(facts.get("MinAPIVersion")))
        self.docker.api_version = "v" + ".".join(map(str, version))
        self._base = f"{base}{self.docker.api_version}/"
        self.architecture = str(facts.get("Arch") or "unknown")

    @asynccontextmanager
    async def stream(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose body, either way, is too large to hold."""
        async with self._session.request(method, self._base + path, **options) as answer:
            if answer.status >= 400:
                raise _refusal(answer.status, await answer.read())
            yield answer

    async def printed(self, sandbox_id: str, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        """What a container's main process prints, as the engine keeps it: the last ten megabytes.

        A last line that does not end is lost by the engine now and then, when the container ends with it. Podman
        stops to follow when it removes the log of a container that ended, so what was printed last may not come.
        """
        import aiohttp

        quiet = aiohttp.ClientTimeout(total=None, sock_connect=10)  # nobody knows when it prints again
        path = f"containers/{sandbox_id}/logs"
        async with self.stream("GET", path, params=params, timeout=quiet) as answer:
            frames = Frames(answer.content)
            while (piece := await frames.next()) is not None:
                yield piece[1]

    async def attach(self, exec_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start an exec that was made, and have the connection's both directions."""
        endpoint = self.endpoint
        if endpoint.socket_path is not None:
            reader, writer = await asyncio.open_unix_connection(endpoint.socket_path, limit=HIGH_WATER)
        else:
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, ssl=self._ssl, limit=HIGH_WATER
            )
        try:
            body = json.dumps({"Detach": False, "Tty": False}).encode()
            writer.write(
                f"POST /{self.docker.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\n"
                "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            status = _status(await reader.readuntil(b"\r\n\r\n"))
            if status >= 400:
                said = b""  # one object; the engine may keep the connection after it
                while not said.rstrip().endswith(b"}") and len(said) < HIGH_WATER:
                    more = await reader.read(_PIECE_BYTES)
                    if not more:
                        break
                    said += more
                raise _refusal(status, said)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, asyncio.LimitOverrunError):
                raise _no_engine() from error
            raise
        return reader, writer


class Frames:
    """A process's standard output and error as the engine sends them on one connection."""

    def __init__(self, reader: asyncio.StreamReader | aiohttp.StreamReader) -> None:
        self._reader = reader
        self._stream, self._left = 1, 0  # of the frame that is being read

    async def next(self) -> tuple[int, bytes] | None:
        """The next piece and which of the two it is of; None at the end."""
        while not self._left:
            try:
                self._stream, self._left = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            except asyncio.IncompleteReadError:
                return None
        piece = await self._reader.read(min(self._left, _PIECE_BYTES))
        self._left -= len(piece)
        return (self._stream, piece) if piece else None


def checked_id(sandbox_id: str) -> str:
    """It goes into a path of the engine's API, where `.` and `..` would lead elsewhere."""
    if not hosted.is_word(sandbox_id):
        raise SERVICE.error(SandboxNotFoundError, f"not a sandbox id: {sandbox_id!r}", sandbox_id)
    return sandbox_id


def _status(head: bytes) -> int:
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise _no_engine()
    return int(words[1])


def _numbers(version: object) -> tuple[int, ...]:
    words = str(version).split(".")
    return tuple(int(word) for word in words) if all(word.isdecimal() for word in words) else ()


def _no_engine() -> ConnectionResetError:
    return ConnectionResetError("what answers there does not speak the engine's API")


def _refusal(status: int, body: bytes) -> Exception:
    import aiodocker

    try:
        words = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        words = body[:2000].decode("utf-8", "replace")
    return aiodocker.DockerError(status, words)
