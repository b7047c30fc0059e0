"""Preview links: a port of a sandbox at an address of its own on this machine, for whoever has its token.

The service gives each port a host name. Names under localhost do not resolve everywhere, so here each
port gets a listener; paths, cookies and WebSockets then work as they do there.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused, proxy_error
from lowtide.emulators.daytona.sandbox import Sandbox, SandboxState
from lowtide.emulators.ports import PortClosed, PortProxy
from lowtide.emulators.web import HttpServer
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

_HEADER, _QUERY = "X-Daytona-Preview-Token", "DAYTONA_SANDBOX_AUTH_KEY"
_COOKIE = "lowtide-preview-"
_OWN_HEADERS = frozenset({"x-daytona-preview-token", "x-daytona-skip-preview-warning"})


@dataclass(eq=False, slots=True, kw_only=True)
class _Preview:
    sandbox: Sandbox
    port: int
    server: asyncio.Server
    address: tuple[str, int]
    signed: dict[str, float] = field(default_factory=dict)


class Previews:
    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self._proxy = PortProxy()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._http = HttpServer(
            app,
            refusal=proxy_error,
            passed_on=lambda request: True,
            allow_remote=ground.settings.allow_remote,
        )
        self._open: dict[tuple[str, int], _Preview] = {}
        self._by_port: dict[int, _Preview] = {}

    async def start(self) -> None:
        await self._http.start()

    async def url(self, sandbox: Sandbox, port: int) -> str:
        preview = await self._preview(sandbox, port)
        return f"http://{preview.address[0]}:{preview.address[1]}"

    async def signed_url(self, sandbox: Sandbox, port: int, seconds: int) -> tuple[str, str]:
        """An address that carries its token, so that it works wherever it is pasted."""
        preview = await self._preview(sandbox, port)
        token = secrets.token_hex(16)
        preview.signed[token] = self.ground.clock.now() + seconds
        return f"http://{preview.address[0]}:{preview.address[1]}/?{_QUERY}={token}", token

    def expire(self, sandbox: Sandbox, port: int, token: str) -> None:
        preview = self._open.get((sandbox.sandbox_id, port))
        if preview is None or preview.signed.pop(token, None) is None:
            raise Refused(404, "Signed preview URL not found")

    def forget(self, sandbox: Sandbox) -> None:
        for key in [key for key in self._open if key[0] == sandbox.sandbox_id]:
            preview = self._open.pop(key)
            self._by_port.pop(preview.address[1], None)
            preview.server.close()

    async def aclose(self) -> None:
        for preview in self._open.values():
            preview.server.close()
        await self._http.aclose()
        await self._proxy.aclose()

    async def _preview(self, sandbox: Sandbox, port: int) -> _Preview:
        key = (sandbox.sandbox_id, port)
        if key not in self._open:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(self._http.connection, self.ground.settings.host, 0)
            address = server.sockets[0].getsockname()[:2]
            if key in self._open:  # another call was first
                server.close()
            else:
                made = _Preview(sandbox=sandbox, port=port, server=server, address=address)
                self._open[key] = self._by_port[address[1]] = made
        return self._open[key]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        here: Any = transport.get_extra_info("sockname") if transport is not None else None
        preview = self._by_port.get(here[1]) if here else None
        if preview is None:
            return proxy_error(request, 404, "not found")
        sandbox = preview.sandbox
        if not sandbox.public and not self._may(request, preview):
            return proxy_error(request, 401, "unauthorized: the preview token is missing or wrong")
        if sandbox.state is not SandboxState.STARTED:
            return proxy_error(request, 400, f"bad request: sandbox is {sandbox.state}")
        headers = {"Host": f"localhost:{preview.port}"}
        dropped = _OWN_HEADERS
        if "Cookie" in request.headers:
            # A browser sends the cookies of every preview along: no sandbox may see another one's.
            dropped |= {"cookie"}
            if cookies := _without_ours(request.headers.getall("Cookie")):
                headers["Cookie"] = cookies
        token, path = _asked(request)
        # So that what a page loads from there, without the query, is let in too.
        cookie = f"{_cookie(preview)}={token}; Path=/; HttpOnly; SameSite=Lax"
        added = {"Set-Cookie": cookie} if token in preview.signed else {}
        try:
            inner = await self.ground.backing.url(sandbox.backing, preview.port)
            return await self._proxy.forward(
                request, inner.url, path=path, headers=headers, drop=dropped, added=added, own_cookies=_COOKIE
            )
        except PortClosed:
            return proxy_error(request, 502, f"bad gateway: nothing listens on port {preview.port}")
        except (LowtideError, Refused) as error:
            return proxy_error(request, 502, f"bad gateway: {error}")

    def _may(self, request: web.Request, preview: _Preview) -> bool:
        asked = _asked(request)[0]
        for given in (request.headers.get(_HEADER, ""), asked):
            if _same(given, preview.sandbox.preview_token):
                return True
        if preview.signed.get(asked, 0.0) > self.ground.clock.now():
            return True
        cookie = request.cookies.get(_cookie(preview), "")
        return preview.signed.get(cookie, 0.0) > self.ground.clock.now() and _from_itself(request)


def _asked(request: web.Request) -> tuple[str, str | None]:
    """The token of the query, and the path that is meant where it is not the request's own.

    On the service the token is part of the host name, so people append a path to the whole address. Here
    that puts it behind the token.
    """
    token, slash, rest = request.query.get(_QUERY, "").partition("/")
    return token, f"/{quote(rest)}" if slash else None


def _cookie(preview: _Preview) -> str:
    """A name of its own for each port: cookies do not tell ports apart."""
    return f"{_COOKIE}{preview.address[1]}"


def _from_itself(request: web.Request) -> bool:
    """Whether the preview's own page, or the person at the browser, makes it send this request.

    Cookies and "same site" ignore the port, so the page of any other sandbox has the browser send the cookie along.
    """
    here = f"http://{request.host}"  # by the name that it is asked by; every preview has a port of its own
    if request.headers.get("Origin", here) != here:
        return False
    if request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return True
    # A link to it on another page.
    return request.method == "GET" and request.headers.get("Sec-Fetch-Dest") == "document"


def _without_ours(cookies: list[str]) -> str:
    every = [one.strip() for line in cookies for one in line.split(";")]
    return "; ".join(one for one in every if not one.startswith(_COOKIE))


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
