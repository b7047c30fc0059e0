"""The Runloop emulator: devboxes, executions, files, snapshots, blueprints and tunnels behind one address.

Tunnels are reached at ``PORT-KEY.tunnel.DOMAIN`` through the CONNECT proxy, and at this address with the
header ``X-Lowtide-Tunnel: PORT-KEY``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.faults import FaultName
from lowtide.emulators.ports import PortClosed, PortProxy
from lowtide.emulators.runloop.account import Account
from lowtide.emulators.runloop.blueprints import Blueprints
from lowtide.emulators.runloop.control import Control
from lowtide.emulators.runloop.devboxes import Devboxes
from lowtide.emulators.runloop.inside import Inside
from lowtide.emulators.runloop.model import Devbox, Refused, Status
from lowtide.emulators.web import HttpServer, through_proxy
from lowtide.errors import LowtideError, ResourceExhaustedError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Address, Ground
    from lowtide.emulators.web import Handler

_DOMAIN = "tunnel.runloop.ai"
_TUNNEL_HEADER, _TOKEN_HEADER = "X-Lowtide-Tunnel", "X-Runloop-Tunnel-Authorization"
_TUNNEL = re.compile(r"([0-9]{1,5})-([0-9a-f]+)")
_OWN_HEADERS = frozenset({_TUNNEL_HEADER.lower(), _TOKEN_HEADER.lower()})
_LARGEST_BODY = 128 << 20


class RunloopEmulator:
    name: ClassVar[str] = "runloop"
    domains: ClassVar[tuple[str, ...]] = (_DOMAIN,)

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.api_key = "ak_" + secrets.token_hex(20)
        self._account = Account(self)
        self.blueprints = Blueprints(ground, self._account)
        self.devboxes = Devboxes(ground, self.blueprints, self._account)
        self._ports = PortProxy()
        self._tasks: set[asyncio.Task[Any]] = set()
        app = web.Application(middlewares=[self._edge(), self._with_key()], client_max_size=_LARGEST_BODY)
        self._account.add_routes(app)
        Control(self).add_routes(app)
        Inside(self).add_routes(app)
        self._server = HttpServer(
            app,
            refusal=_error,
            passed_on=lambda request: self._tunnelled(request) is not None,
            answered=partial(ground.answered, self.name),
            allow_remote=ground.settings.allow_remote,
        )

    async def start(self, address: Address) -> None:
        self.url = address.url
        await self._server.start()

    def connection(self) -> asyncio.BaseProtocol:
        return self._server.connection()

    def environment(self, *, plain: bool) -> dict[str, str]:
        found = {"RUNLOOP_API_KEY": self.api_key, "RUNLOOP_BASE_URL": self.url}
        return found if plain else {**found, **self.ground.proxy_environment()}

    def sandboxes(self) -> list[dict[str, Any]]:
        """What still exists: an ended devbox stays in lists, and holds nothing."""
        return [
            {
                "sandbox_id": devbox.devbox_id,
                "name": devbox.name,
                "state": str(devbox.status),
                "metadata": devbox.metadata,
                "created_at": devbox.created_at,
            }
            for devbox in self.devboxes.table.values()
            if devbox.status not in (Status.SHUTDOWN, Status.FAILURE)
        ]

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(LowtideError, Refused):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def vanish(self, devbox: Devbox, seconds: float) -> None:
        """The devbox goes in the middle of what it does."""

        async def go() -> None:
            await asyncio.sleep(seconds)
            await self.devboxes.shutdown(devbox, force=True)

        self.background(go())

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.blueprints.aclose()
        await self.devboxes.aclose()
        await self._server.aclose()
        await self._ports.aclose()
        self._account.close()

    # ------------------------------------------------------------ who may come in

    def _with_key(self) -> Any:
        @web.middleware
        async def with_key(request: web.Request, handler: Handler) -> web.StreamResponse:
            operation = getattr(request.match_info.handler, "__name__", "unknown").replace("_", "-")
            named = request.match_info.get("id", "")
            self.ground.requests.note("runloop", operation, {"sandbox_id": named})
            if request.path.startswith("/storage/"):  # its address is signed
                return await self._answer(request, handler)
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            facts = {"operation": operation, "sandbox_id": named}
            take = self.ground.faults.take
            if not hmac.compare_digest(given.encode(), self.api_key.encode()) or take(
                FaultName.STALE_TOKEN, "runloop", facts
            ):
                return _error(request, 401, "Unauthorized: the API key is missing or wrong")
            if fault := take(FaultName.RATE_LIMIT, "runloop", facts):
                answer = _error(request, 429, "Too many requests")
                answer.headers["Retry-After"] = f"{fault.seconds or 1:g}"
                return answer
            if fault := take(FaultName.UNAVAILABLE, "runloop", facts):
                return _error(request, fault.status or 503, "Service unavailable")
            return await self._answer(request, handler)

        return with_key

    @staticmethod
    async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as error:
            return _error(request, error.status, str(error))
        except AgentError as error:
            return _error(request, 404 if error.kind == "ENOENT" else 400, str(error))
        except ResourceExhaustedError as error:
            return _error(request, 429, str(error))
        except web.HTTPException as error:
            return _error(request, error.status, error.reason)
        except LowtideError as error:
            return _error(request, 400, f"the devbox does not answer: {error}")

    # ------------------------------------------------------------ tunnels

    def _tunnelled(self, request: web.Request) -> tuple[int, str] | None:
        text = request.headers.get(_TUNNEL_HEADER, "")
        if not text and through_proxy(request):
            text = request.host.removesuffix("." + _DOMAIN)
        found = _TUNNEL.fullmatch(text)
        return (int(found[1]), found[2]) if found else None

    def _edge(self) -> Any:
        @web.middleware
        async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
            meant = self._tunnelled(request)
            return await handler(request) if meant is None else await self._through(request, *meant)

        return edge

    async def _through(self, request: web.Request, port: int, key: str) -> web.StreamResponse:
        devbox = next(
            (one for one in self.devboxes.table.values() if one.tunnel and one.tunnel.key == key), None
        )
        if devbox is None or devbox.tunnel is None or not 1 <= port <= 65_535:
            return _error(request, 404, "tunnel not found")
        token = devbox.tunnel.token
        given = request.headers.get(_TOKEN_HEADER, "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
            return _error(request, 401, "the tunnel's token is missing or wrong")
        try:
            if devbox.status is Status.SUSPENDED and devbox.tunnel.wake_on_http:
                await self.devboxes.resume(devbox)
                await self.devboxes.wait(devbox, (Status.RUNNING,), 25.0)
            if devbox.tunnel.http_keep_alive:
                self.devboxes.touch(devbox)
            inner = await self.ground.backing.url(devbox.backing, port)
            return await self._ports.forward(
                request, inner.url, headers={"Host": f"localhost:{port}"}, drop=_OWN_HEADERS
            )
        except Refused as error:
            return _error(request, 502, str(error))
        except (PortClosed, LowtideError):
            return _error(request, 502, f"nothing listens on port {port}")


def _error(request: web.Request, status: int, message: str) -> web.Response:
    return web.json_response({"message": message, "code": status}, status=status)
