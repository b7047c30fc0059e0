"""Public services: a port of a sandbox at an address of its own on this machine."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.coreweave.model import Box
from lowtide.emulators.coreweave.refusal import Refused
from lowtide.emulators.ports import PortClosed, PortProxy
from lowtide.emulators.web import HttpServer
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

_HEADER, _QUERY = "X-Sandbox-Share-Token", "share_token"


class Services:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._proxy = PortProxy()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._http = HttpServer(
            app, refusal=_error, passed_on=lambda request: True, allow_remote=ground.settings.allow_remote
        )
        self._servers: dict[str, list[asyncio.Server]] = {}
        self._meant: dict[int, tuple[Box, int]] = {}

    async def start(self) -> None:
        await self._http.start()

    async def open(self, box: Box) -> None:
        """An address for each of its services."""
        for service in box.spec.services:
            server = await asyncio.get_running_loop().create_server(
                self._http.connection, self._ground.settings.host, 0
            )
            host, port = server.sockets[0].getsockname()[:2]
            self._servers.setdefault(box.sandbox_id, []).append(server)
            self._meant[port] = box, service.port
            box.urls[service.port] = f"http://{host}:{port}"

    def close(self, box: Box) -> None:
        for server in self._servers.pop(box.sandbox_id, ()):
            for sock in server.sockets:
                self._meant.pop(sock.getsockname()[1], None)
            server.close()

    async def aclose(self) -> None:
        for servers in self._servers.values():
            for server in servers:
                server.close()
        await self._http.aclose()
        await self._proxy.aclose()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        here: Any = request.transport.get_extra_info("sockname") if request.transport is not None else None
        meant = self._meant.get(here[1]) if here else None
        if meant is None:
            return _error(request, 404, "not found")
        box, port = meant
        if not _may(request, box, port):
            return _error(request, 401, "the share token is missing or wrong")
        try:
            inner = await self._ground.backing.url(box.backing, port)
            return await self._proxy.forward(
                request,
                inner.url,
                headers={"Host": f"localhost:{port}"},
                drop=frozenset({_HEADER.lower()}),
            )
        except (PortClosed, LowtideError, Refused):
            return _error(request, 502, f"nothing listens on port {port}")


def _may(request: web.Request, box: Box, port: int) -> bool:
    if not box.shares:
        return True
    given = request.headers.get(_HEADER) or request.query.get(_QUERY, "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), box.share_token.encode())


def _error(request: web.Request, status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)
