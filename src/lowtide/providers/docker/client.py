"""The connection to one engine: aiodocker for the API, and the two kinds of stream it does not cover.

aiodocker holds archives in memory, and its own stream of an exec breaks with assertions and is closed only when
all is sent; so those two go over its session or a connection of our own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import stat
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from lowtide.errors import SandboxNotFoundError
from lowtide.providers import hosted
from lowtide.providers.docker.access import Endpoint
from lowtide.providers.docker.errors import NO_CONTAINER, SERVICE
from lowtide.providers.hosted.errors import names_another

if TYPE_CHECKING:
    import aiodocker
    import aiohttp

_API_VERSION = (1, 41)  # Docker 20.10 and later, Podman 4 and later; Docker 29 takes none before 1.44
HIGH_WATER = 1 << 20
_LINKS = 10  # from one path to the next, before it counts as none
# As Go writes a file's mode: the type stands in its upper bits.
_GO_LINK, _GO_TYPE = 1 << 27, 1 << 31 | 1 << 27 | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
_GO_KINDS = {1 << 31: stat.S_IFDIR, 1 << 25: stat.S_IFIFO, 1 << 24: stat.S_IFSOCK, 1 << 26: stat.S_IFBLK}
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
        self._timeout = timeout
        self.docker: aiodocker.Docker = aiodocker.Docker(
            url=url, connector=connector, session=self._session, timeout=timeout
        )
        self.docker.docker_host = url
        self.architecture = ""
        """Of the engine's machine, as the engine calls it."""
        self._base = ("http://localhost" if endpoint.local else url) + "/"

    async def request(
        self, method: str, path: str, *, body: Any = None, seconds: float | None = None, **options: Any
    ) -> Any:
        """The engine's answer, as JSON. Raises ConnectionResetError for one that no engine gives: a proxy's page proves
        nothing. `seconds`: how long the engine may be silent."""
        async with self.stream(method, path, **self._options(body, seconds), **options) as answer:
            content = await answer.read()
        try:
            said = json.loads(content)
        except ValueError:
            raise _no_engine() from None
        if not isinstance(said, dict | list):
            raise _no_engine()
        return said

    async def order(
        self, path: str, *, method: str = "POST", seconds: float | None = None, **options: Any
    ) -> None:
        """A request that the engine confirms without a word: 204, or 304 where it was so already. Any other answer is
        not the engine's, and confirms nothing."""
        async with self.stream(method, path, **self._options(None, seconds), **options) as answer:
            await answer.read()
            if answer.status not in (204, 304):
                raise _no_engine()

    def _options(self, body: Any, seconds: float | None) -> dict[str, Any]:
        import aiohttp

        options: dict[str, Any] = {"json": body} if body is not None else {}
        if seconds is not None:
            options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=seconds)
        return options

    async def inspect(self, container: str) -> dict[str, Any]:
        """One container, by the engine's id or by its name."""
        facts = await self.request("GET", f"containers/{container}/json")
        if not isinstance(facts, dict) or not is_engine_id(facts.get("Id")):
            raise _no_engine()
        return facts

    async def make(self, body: Mapping[str, Any], name: str) -> str:
        """A container that is not started. Returns the engine's id."""
        made = await self.request("POST", "containers/create", body=body, params={"name": name})
        if not isinstance(made, dict) or not is_engine_id(made.get("Id")):
            raise _no_engine()
        return str(made["Id"])

    async def exec(self, container_id: str, argv: Sequence[str], user: str) -> str:
        """A command that is not started. Over a connection of its own: one from the pool may have gone silent together
        with the channel that this one replaces."""
        body = {
            "Cmd": list(argv),
            "User": user,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
        }
        headers = {"Connection": "close"}
        async with self._fresh() as session:
            url = f"{self._base}containers/{container_id}/exec"
            async with session.post(url, json=body, headers=headers) as answer:
                content = await answer.read()
                if answer.status >= 400:
                    raise _refusal(answer.status, content, container_id)
        try:
            identity = json.loads(content)["Id"]
        except (ValueError, KeyError, TypeError):
            raise _no_engine() from None
        if not is_engine_id(identity):
            raise _no_engine()
        return str(identity)

    def _fresh(self) -> aiohttp.ClientSession:
        import aiohttp

        connector: aiohttp.BaseConnector
        if self.endpoint.socket_path is not None:
            connector = aiohttp.UnixConnector(self.endpoint.socket_path, force_close=True)
        else:
            connector = aiohttp.TCPConnector(force_close=True, ssl=self._ssl or False)
        return aiohttp.ClientSession(connector=connector, timeout=self._timeout)

    async def kind_of(self, container_id: str, path: str) -> int | None:
        """The type bits (`stat.S_IFMT`) of a path in a container's files, which may not run yet. None: there is no such
        path, or this engine does not tell. Nothing in there is opened."""
        import aiodocker

        for _ in range(_LINKS):
            request = self.stream("HEAD", f"containers/{container_id}/archive", params={"path": path})
            try:
                async with request as answer:
                    text = answer.headers.get("X-Docker-Container-Path-Stat", "")
            except aiodocker.DockerError:
                return None
            try:
                told = json.loads(base64.b64decode(text))
                mode, target = int(told["mode"]), str(told.get("linkTarget") or "")
            except (ValueError, KeyError, TypeError):
                return None
            if not mode & _GO_LINK or not target:
                return stat.S_IFREG if not mode & _GO_TYPE else _GO_KINDS.get(mode & _GO_TYPE, stat.S_IFCHR)
            path = target
        return None

    async def on_this_machine(self) -> bool:
        """Whether the engine shares this machine's kernel, by name, release and memory. A socket here may lead anywhere:
        into a virtual machine, or through a forward to another machine."""
        if not self.endpoint.local:
            return False
        facts = await self.request("GET", "info")
        known = (
            (facts.get("Name"), facts.get("KernelVersion"), facts.get("MemTotal"))
            if isinstance(facts, dict)
            else ()
        )
        here, memory = os.uname(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return known == (here.nodename, here.release, memory)

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
                kind, _, rest = path.partition("/")
                asked = rest.partition("/")[0] if kind == "containers" else None
                raise _refusal(answer.status, await answer.read(), asked)
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


def is_engine_id(value: Any) -> bool:
    """As engines name containers, execs and networks: it goes into a path of their API."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


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
    return ConnectionResetError(
        "the answer is not a container engine's. A proxy or another server may stand where DOCKER_HOST leads"
    )


def _refusal(status: int, body: bytes, container: str | None = None) -> Exception:
    """`container`: the id or name that was asked for. "No such container" with another one's proves nothing of it."""
    import aiodocker

    try:
        words = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        words = body[:2000].decode("utf-8", "replace")
    if container is not None and any(one in words.lower() for one in NO_CONTAINER):
        # Podman may find the id of a name, and then no container with that id.
        ids = re.findall(r"\b[0-9a-f]{64}\b", words) if is_engine_id(container) else []
        if (ids and container not in ids) or (not ids and names_another(words, container)):
            return ConnectionResetError(
                "the engine, or a proxy before it, speaks of another container than the one it was asked for"
            )
    return aiodocker.DockerError(status, words)
