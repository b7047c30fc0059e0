"""A proxy in front of a real HTTP API that cuts, delays, goes silent and rewrites answers.

It stands before a Docker socket or a Kubernetes API server::

    async with LyingProxy.before_docker(url) as proxy:
        provider = DockerProvider.connect({"DOCKER_HOST": proxy.docker_host})
        proxy.lie("DELETE", r"/containers/", answer=HTML)

One connection carries one request, so that each can be lied about alone. What upgrades (an exec's streams, a websocket)
is passed on as bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_PAGE = b"<html><body>Your session has expired. Please log in.</body></html>"
HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_PAGE),
    _PAGE,
)
"""What a login page or a load balancer answers in the place of the API."""


def json_answer(body: bytes, status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


@dataclass
class Lie:
    """What happens to requests that match. Without `forward` the API never sees them."""

    method: str
    path: re.Pattern[str]
    times: int | None
    forward: bool = True
    answer: bytes | None = None
    """In the place of the API's own."""
    cut: bool = False
    """The connection ends without an answer."""
    delay_seconds: float = 0.0
    """Before the request is forwarded or answered."""
    silent: bool = False
    """No answer and no end."""


@dataclass
class LyingProxy:
    connect: Callable[[], Awaitable[Streams]]
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and target of each request that came, in their order."""

    def __post_init__(self) -> None:
        self._lies: deque[Lie] = deque()
        self._silent: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @classmethod
    def before_docker(cls, url: str) -> LyingProxy:
        path = urlsplit(url).path
        return cls(lambda: asyncio.open_unix_connection(path))

    @classmethod
    def before_kubernetes(cls, server: str, tls: ssl.SSLContext | None) -> LyingProxy:
        """`tls` also proves who asks: the proxy's own clients need no certificate."""
        parts = urlsplit(server)
        return cls(lambda: asyncio.open_connection(parts.hostname, parts.port, ssl=tls))

    @property
    def docker_host(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lie(self, method: str, path: str, *, times: int | None = None, **what: Any) -> Lie:
        """The newest lie that matches counts. `times`: after so many requests it is forgotten."""
        lie = Lie(method, re.compile(path), times, **what)
        self._lies.appendleft(lie)
        return lie

    def truth(self) -> None:
        self._lies.clear()

    def go_silent(self) -> None:
        """As a firewall that has forgotten the connections it passed: those that exist carry nothing any more, in either
        direction, and do not end. New ones work."""
        self._silent |= self._tasks

    def count(self, method: str, path: str) -> int:
        return sum(1 for one, target in self.requests if one == method and re.search(path, target))

    # -- one connection

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Cancelled: the proxy ends. A task of Python 3.11's server must not, or it is reported.
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
                await self._serve(reader, writer, task)
        finally:
            self._tasks.discard(task)
            self._silent.discard(task)
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target = head.split(b" ", 2)[:2]
        self.requests.append((method.decode(), target.decode()))
        upgrade = re.search(rb"(?im)^upgrade:", head) is not None
        lie = self._lie(method.decode(), target.decode())
        if lie is not None:
            await asyncio.sleep(lie.delay_seconds)
            if not lie.forward:
                await self._answer(lie, reader, writer)
                return
        upstream, to_upstream = await self.connect()
        try:
            if not upgrade:
                lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
                head = b"\r\n".join([lines[0], b"Connection: close", *lines[1:]])
            to_upstream.write(head)
            inward = asyncio.create_task(self._pass(reader, to_upstream, task))
            try:
                if lie is not None and (lie.answer is not None or lie.cut or lie.silent):
                    while await upstream.read(1 << 16):  # the API has done it
                        pass
                    await self._answer(lie, reader, writer)
                else:
                    await self._pass(upstream, writer, task)
            finally:
                inward.cancel()
        finally:
            to_upstream.transport.abort()

    def _lie(self, method: str, target: str) -> Lie | None:
        for lie in self._lies:
            if lie.method == method and lie.path.search(target):
                if lie.times is not None:
                    lie.times -= 1
                    if lie.times <= 0:
                        self._lies.remove(lie)
                return lie
        return None

    async def _answer(self, lie: Lie, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if lie.silent:
            await asyncio.Event().wait()
        if lie.answer is not None and not lie.cut:
            writer.write(lie.answer)
            await writer.drain()
            writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):  # until it has been read
                    while await reader.read(1 << 16):
                        pass

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if task in self._silent:
                    await asyncio.Event().wait()
                writer.write(data)
                await writer.drain()
            if task in self._silent:
                await asyncio.Event().wait()
            if writer.can_write_eof():
                writer.write_eof()
