"""Requests into a sandbox's own ports: HTTP and WebSocket, passed through as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import aiohttp
import yarl
from aiohttp import web
from multidict import CIMultiDict

from lowtide.emulators.request_check import Malformed
from lowtide.emulators.web import drop as drop_connection

_HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
    ]
)


class PortClosed(Exception):
    """Nothing in the sandbox listens there."""


class PortProxy:
    """Passes requests on; one connection pool for all sandboxes of an emulator."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def forward(
        self,
        request: web.Request,
        base: str,
        *,
        path: str | None = None,
        headers: Mapping[str, str] | None = None,
        drop: frozenset[str] = frozenset(),
        added: Mapping[str, str] | None = None,
        own_cookies: str | None = None,
    ) -> web.StreamResponse:
        """Answer `request` with what `base` answers, `added` on its head. PortClosed when nothing is there.

        `own_cookies`: how the names of cookies begin that nothing in a sandbox may set.
        """
        target = base.rstrip("/") + (_raw_path(request) if path is None else path)
        passed: CIMultiDict[str] = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in _HOP_BY_HOP and name.lower() not in drop
        )
        for name, value in (headers or {}).items():
            passed[name] = value
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._websocket(request, target, passed)
        body: AsyncIterator[bytes] | None = None
        if request.can_read_body:
            body = request.content.iter_any()
        try:
            answer = await self._client().request(
                request.method, _exact(target), headers=passed, data=body, allow_redirects=False
            )
        except aiohttp.ClientError as error:  # nothing listens, or what answers does not speak HTTP
            raise PortClosed from error
        async with answer:
            if answer.status < 200:  # it changed to a protocol that nobody asked for
                raise PortClosed
            response = web.StreamResponse(status=answer.status, reason=_printable(answer.reason))
            for name, value in answer.headers.items():
                if own_cookies and name.lower() == "set-cookie" and value.lstrip().startswith(own_cookies):
                    continue
                if name.lower() not in _HOP_BY_HOP:
                    response.headers.add(name, _printable(value))
            for name, value in (added or {}).items():
                response.headers.add(name, value)
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            except aiohttp.ClientError:
                # Cut off in there is cut off out here: a clean end would look like a whole answer.
                drop_connection(request)
                raise asyncio.CancelledError from None
            await response.write_eof()
            return response

    async def _websocket(
        self, request: web.Request, target: str, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        for name in [name for name in headers if name.lower().startswith("sec-websocket-")]:
            headers.popall(name, None)
        offered = [
            p.strip() for p in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if p.strip()
        ]
        outer = web.WebSocketResponse(max_msg_size=0, autoping=False)
        if not outer.can_prepare(request):
            raise Malformed("the request is no WebSocket handshake")
        try:
            inner = await self._client().ws_connect(
                _exact(target), headers=headers, protocols=offered, max_msg_size=0, autoping=False
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status < 200:  # it said yes, and not to this handshake
                raise PortClosed from error
            return web.Response(status=error.status)
        except (aiohttp.ClientError, ValueError) as error:
            raise PortClosed from error
        sides: list[asyncio.Task[None]] = []
        try:
            protocols = (inner.protocol,) if inner.protocol else ()
            outer = web.WebSocketResponse(protocols=protocols, max_msg_size=0, autoping=False)
            await outer.prepare(request)
            sides = [asyncio.create_task(_pass_on(outer, inner)), asyncio.create_task(_pass_on(inner, outer))]
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
            await inner.close()
        await outer.close()
        return outer

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def _raw_path(request: web.Request) -> str:
    """As it was sent, but for the address of a server in front of it, which HTTP allows and proxies send."""
    return request.raw_path if request.raw_path.startswith("/") else str(request.rel_url)


def _printable(text: str | None) -> str:
    """What a program in a sandbox says on its head, without what no head may hold."""
    return "".join(one if one.isprintable() or one == "\t" else "?" for one in text or "")


def _exact(url: str) -> yarl.URL:
    return yarl.URL(url, encoded=True)


_Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _pass_on(source: _Socket, sink: _Socket) -> None:
    async for message in source:
        if message.type is aiohttp.WSMsgType.TEXT:
            await sink.send_str(message.data)
        elif message.type is aiohttp.WSMsgType.BINARY:
            await sink.send_bytes(message.data)
        elif message.type is aiohttp.WSMsgType.PING:
            await sink.ping(message.data)
        elif message.type is aiohttp.WSMsgType.PONG:
            await sink.pong(message.data)
    await sink.close(code=source.close_code or 1000)
