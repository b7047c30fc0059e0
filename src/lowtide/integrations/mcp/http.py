"""The server over streamable HTTP on loopback: a token for all, a connection for each client, an end when it is gone.

HTTP has no end of a connection that a killed client could not help. What tells of it: DELETE of the session; the
client's open event stream, once it had one, breaking off; and for those that never open one, silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowtide.errors import SessionClosedError, ValidationError
from lowtide.integrations.mcp.connection import Bounds, Connection
from lowtide.integrations.mcp.server import make_server

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("lowtide.mcp")

SESSION_HEADER = b"mcp-session-id"
VERSION_HEADER = b"mcp-protocol-version"
SESSIONLESS = ""
"""The connection of clients whose protocol (2026-07-28) has no sessions: they share one."""
RECONNECT_SECONDS = 10.0
"""How long a client whose event stream broke off has to come back."""
_LOOK_SECONDS = 0.5
_REST_SECONDS, _REST_BYTES = 1.0, 1 << 20
"""How much of what a refused client still sends is taken."""
_STRANGERS = 100
"""Connections without the token, at once: the oldest one makes way for a new one."""
_HEAD_SECONDS = 10.0
"""For a connection's next request with the token."""
_BODY_SECONDS = 60.0
"""For all of a request's body."""
_ACCEPTED_AT_ONCE = 32
"""Connections that the loop takes before it looks after those it has."""
_SESSIONS = 256
"""At once: each may have --max-sandboxes."""
_TRUSTED = 2 * _SESSIONS
"""Connections with the token, at once: an event stream and a request for each session."""


@dataclass(slots=True)
class _Client:
    """What is known of one client: its sandboxes, and the signs that it lives."""

    connection: Connection
    open_requests: int = 0
    had_stream: bool = False
    quiet_since: float = field(default_factory=time.monotonic)

    def gone(self, idle_seconds: float) -> bool:
        patience = min(RECONNECT_SECONDS, idle_seconds) if self.had_stream else idle_seconds
        return self.open_requests == 0 and time.monotonic() - self.quiet_since >= patience


@dataclass(slots=True)
class _Open:
    """One open connection. Its timer runs while there is no request on it."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle | None
    trusted: bool = False
    """Its last request had the token."""
    at_work: bool = False
    """A whole request came on it and is being answered."""


class OpenConnections:
    """Every open connection, bounded in number; and in time while it has no request with the token.

    Each is a descriptor of the server's. Without the bounds, connections would leave none for the clients' own
    sandboxes. Connections without the token and with it are counted apart, so that connections
    without it cannot displace clients.
    """

    def __init__(self) -> None:
        self._open: dict[Any, _Open] = {}
        self._trusted = 0

    def protocol(self) -> type[H11Protocol]:
        """The HTTP protocol whose connections are counted here."""
        connections = self

        class Bounded(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                connections.add(self.client, transport)

            def connection_lost(self, exc: Exception | None) -> None:
                connections.remove(self.client)
                super().connection_lost(exc)

        return Bounded

    def add(self, peer: Any, transport: asyncio.Transport) -> None:
        """A new connection. The oldest one without the token makes way where there are too many."""
        if len(self._open) - self._trusted >= _at_most(_STRANGERS, 4):
            self._end(next(peer for peer, one in self._open.items() if not one.trusted))
        self._open[peer] = _Open(transport, self._timer(peer))

    def trust(self, peer: Any) -> bool:
        """A request with the token began there. False: there are too many of those, and each is being answered.

        Else the oldest one makes way on which nothing is.
        """
        one = self._open.get(peer)
        if one is None:  # it has ended meanwhile
            return True
        if not one.trusted and self._trusted >= _at_most(_TRUSTED, 3):
            idle = next((peer for peer, one in self._open.items() if one.trusted and not one.at_work), None)
            if idle is None:
                return False
            self._end(idle)
        self._trusted += not one.trusted
        one.trusted = True
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None
        return True

    def work(self, peer: Any) -> None:
        """The whole request came."""
        if (one := self._open.get(peer)) is not None:
            one.at_work = True

    def rest(self, peer: Any) -> None:
        """Its request was answered: it has so long to send another one."""
        one = self._open.get(peer)
        if one is not None and one.timer is None:
            one.at_work = False
            one.timer = self._timer(peer)

    def remove(self, peer: Any) -> None:
        one = self._open.pop(peer, None)
        if one is not None:
            self._trusted -= one.trusted
            if one.timer is not None:
                one.timer.cancel()

    def _timer(self, peer: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(_HEAD_SECONDS, self._end, peer)

    def _end(self, peer: Any) -> None:
        transport = self._open[peer].transport
        self.remove(peer)
        transport.abort()


def _at_most(number: int, part: int) -> int:
    """That many, or that part of the descriptors this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(number, limit // part) if limit > 0 else number


class Clients:
    """Every client of one server, by its session id; an ASGI application around the server's own."""

    def __init__(
        self, defaults: Mapping[str, Any], bounds: Bounds, *, token: str, idle_seconds: float
    ) -> None:
        self._defaults, self._bounds, self._idle_seconds = defaults, bounds, idle_seconds
        self._token = token.encode()
        self.connections = OpenConnections()
        self._clients: dict[str, _Client] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._server = make_server(self._connection_of, self._life)
        self._app = self._server.streamable_http_app(
            session_idle_timeout=idle_seconds, max_sessions=_SESSIONS
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Of two with one name the first counts, as for the server itself.
        headers = dict(reversed(scope["headers"]))
        if not self._is_allowed(headers.get(b"authorization", b"")):
            await _take_rest(receive)
            await _refuse(send)
            return
        peer = scope.get("client")
        if not self.connections.trust(peer):
            await _take_rest(receive)
            await _too_many(send)
            return
        if scope["method"] != "POST":  # it has no body
            self.connections.work(peer)
        try:
            whole = _within(_BODY_SECONDS, receive, lambda: self.connections.work(peer))
            await self._serve(scope, whole, send, headers)
        finally:
            self.connections.rest(peer)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, headers: Mapping[bytes, bytes]
    ) -> None:
        name = headers.get(SESSION_HEADER, b"").decode("latin-1")
        if scope.get("path") != "/mcp" or (not name and VERSION_HEADER not in headers):
            await self._app(scope, receive, self._opening(send))
            return
        client = self._clients.get(name) if name else self._sessionless()
        if client is None:  # guessed, or ended: what it had is gone, and the client has to hear of that
            await _take_rest(receive)
            await _not_found(send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                client.had_stream |= bool(name) and scope["method"] == "GET" and status < 400
            await send(message)

        client.open_requests += 1
        try:
            # Some clients name a version when they open a session, too.
            await self._app(scope, receive, watch if name else self._opening(watch))
        finally:
            client.open_requests -= 1
            client.quiet_since = time.monotonic()
        if name and (status == 404 or (scope["method"] == "DELETE" and status < 400)):
            await self._end(name)

    def _opening(self, send: Send) -> Send:
        """Sends, and takes note of the session that the server opens with its answer."""

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                name = dict(message["headers"]).get(SESSION_HEADER, b"").decode("latin-1")
                if name:
                    self._clients[name] = _Client(Connection(self._defaults, self._bounds))
            await send(message)

        return watch

    def _sessionless(self) -> _Client:
        if SESSIONLESS not in self._clients:
            self._clients[SESSIONLESS] = _Client(Connection(self._defaults, self._bounds))
        return self._clients[SESSIONLESS]

    def _connection_of(self, ctx: Context[Any, Any]) -> Connection:
        name = (ctx.headers or {}).get(SESSION_HEADER.decode(), SESSIONLESS)
        client = self._clients.get(name) if name else self._sessionless()
        if client is None:
            raise SessionClosedError("this session has ended, and its sandboxes with it")
        return client.connection

    def _is_allowed(self, said: bytes) -> bool:
        kind, _, token = said.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)

    @contextlib.asynccontextmanager
    async def _life(self, _: MCPServer[None]) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            looking.cancel()
            every = [self._end(name) for name in list(self._clients)]
            await asyncio.gather(*every, *self._ending, return_exceptions=True)

    async def _look(self) -> None:
        """End the connections of those that have gone."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for name in [name for name, one in self._clients.items() if one.gone(self._idle_seconds)]:
                log.info("a client has gone; its sandboxes end")
                # Each by itself: one that takes long must not keep the others' alive. Forgotten at once, so that
                # nobody comes back to it meanwhile.
                ending = asyncio.create_task(self._give_up(name, self._clients.pop(name)))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def _give_up(self, name: str, client: _Client) -> None:
        """The server's own session goes with it: there are only so many, and it would wait for its client as if it had none."""
        if name:
            await _delete(self._app, name)
        await _close(client)

    async def _end(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            await _close(client)


async def _close(client: _Client) -> None:
    try:
        await client.connection.close()
    except Exception:
        log.exception("at the end of a connection")


async def _delete(app: App, name: str) -> None:
    """As the client itself would have done it."""
    headers = [(b"host", b"127.0.0.1:0"), (SESSION_HEADER, name.encode("latin-1"))]
    scope = {"type": "http", "method": "DELETE", "path": "/mcp", "query_string": b"", "headers": headers}

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(_: Message) -> None:
        pass

    try:
        await app(scope, receive, send)
    except Exception:
        log.exception("at the end of a session")


def serve_http(
    defaults: Mapping[str, Any],
    bounds: Bounds,
    *,
    port: int,
    token: str,
    idle_seconds: float,
    ready: Callable[[str], None],
) -> None:
    """Until it is told to end. On loopback only: whoever may call this may run things here."""
    clients = Clients(defaults, bounds, token=token, idle_seconds=idle_seconds)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            why = f"port {port} of 127.0.0.1 cannot be served: {error.strerror}; 0 takes any that is free"
            raise ValidationError(why, argument="--http") from error
        listening.listen()
        ready(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp")
        config = uvicorn.Config(
            clients,
            http=clients.connections.protocol(),
            ws="none",
            backlog=_ACCEPTED_AT_ONCE,
            log_level="warning",
            timeout_graceful_shutdown=2,
            access_log=False,
        )
        uvicorn.Server(config).run(sockets=[listening])


async def _take_rest(receive: Receive) -> None:
    """Of a request that is refused: in the midst of what it sends, a client would find its connection reset and not why."""
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REST_SECONDS):
            while taken < _REST_BYTES:
                message = await receive()
                if not message.get("more_body", False):
                    return
                taken += len(message.get("body", b""))


def _within(seconds: float, receive: Receive, on_whole: Callable[[], None]) -> Receive:
    """As `receive`; when the body takes longer than that, the client counts as gone. `on_whole`: all of it came."""
    deadline = time.monotonic() + seconds
    complete = False

    async def bounded() -> Message:
        nonlocal complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        if not message.get("more_body", False):
            complete = True
            on_whole()
        return message

    return bounded


async def _refuse(send: Send) -> None:
    body = b'{"error": "the Authorization header must be: Bearer TOKEN; lowtide mcp --print-config shows it"}'
    await _answer(send, 401, body, (b"www-authenticate", b"Bearer"))


async def _too_many(send: Send) -> None:
    body = b'{"error": "this server has too many open connections: close some, or try again later"}'
    await _answer(send, 503, body, (b"connection", b"close"), (b"retry-after", b"1"))


async def _not_found(send: Send) -> None:
    """As the server says it: a client that hears this begins a new session."""
    await _answer(
        send,
        404,
        b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32600, "message": "Session not found"}}',
    )


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    about = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*about, *headers]})
    await send({"type": "http.response.body", "body": body})
