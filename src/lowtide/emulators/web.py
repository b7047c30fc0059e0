"""An aiohttp application as a connection factory, with the checks every emulator's port makes first."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves `app` on whatever connections it is given."""

    def __init__(self, app: web.Application, *, allow_remote: bool = False) -> None:
        app.middlewares.insert(0, _check_host_and_origin(allow_remote))
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, shutdown_timeout=0.2, handler_cancellation=True
        )

    async def start(self) -> None:
        await self._runner.setup()

    def connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "start() comes first"
        return server()

    async def aclose(self) -> None:
        await self._runner.cleanup()


def through_proxy(request: web.Request) -> bool:
    """True for what came through the CONNECT proxy: it had to show the proxy's token to get here."""
    return request.transport is not None and request.transport.get_extra_info("ssl_object") is not None


def _check_host_and_origin(allow_remote: bool) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A web page can make a browser send requests to loopback, by a name it controls (Host) or
        # directly (Origin). Neither gets past here, whatever else it knows.
        if not through_proxy(request) and not allow_remote:
            if not _is_local(request.headers.get("Host", "")):
                return web.json_response({"code": 403, "message": "Host is not a loopback name"}, status=403)
            origin = request.headers.get("Origin")
            if origin is not None and not _is_local(urlsplit(origin).netloc):
                return web.json_response({"code": 403, "message": "Origin is not local"}, status=403)
        try:
            return await handler(request)
        except ConnectionResetError:  # the caller has left
            drop(request)
            raise asyncio.CancelledError from None

    return check


def _is_local(netloc: str) -> bool:
    host = urlsplit(f"//{netloc}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def drop(request: web.Request) -> None:
    """Reset the connection without an answer, as a crashed server or a lost network does.

    A reset, not a close: clients tell the two apart, and only a reset cannot be taken for an end.
    """
    transport = request.transport
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
