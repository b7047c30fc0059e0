"""The E2B emulator: control plane, envd, code interpreter and sandbox ports behind one address.

Two ways lead here, and both look the same from inside: plain URLs, where headers name the sandbox and
port, and the CONNECT proxy, where the host does (``49983-ID.e2b.app``).
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web

from lowtide.emulators.e2b import connect, interpreter
from lowtide.emulators.e2b.connect import RpcError
from lowtide.emulators.e2b.control import Control, error_answer, new_api_key
from lowtide.emulators.e2b.files import Files
from lowtide.emulators.e2b.filesystem import FilesystemService
from lowtide.emulators.e2b.model import NotFound, Sandbox
from lowtide.emulators.e2b.process import ProcessService
from lowtide.emulators.e2b.sandboxes import Sandboxes
from lowtide.emulators.faults import FaultName
from lowtide.emulators.ports import PortClosed, PortProxy
from lowtide.emulators.request_check import Malformed, whole_number
from lowtide.emulators.web import HttpServer, drop, through_proxy
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Address, Ground
    from lowtide.emulators.web import Handler

_ENVD = 49983
_DOMAIN = "e2b.lowtide.invalid"
"""Resolves nowhere, by RFC 6761: a client that knows neither the URLs nor the proxy fails, and never gets out."""
_LARGEST_BODY = 64 << 20  # a message of envd, which carries stdin
_PORT_HOST = re.compile(r"(\d{1,5})-([a-z0-9]+)\.")
_EDGE_HEADERS = frozenset({"e2b-sandbox-id", "e2b-sandbox-port", "e2b-traffic-access-token"})


class E2BEmulator:
    name: ClassVar[str] = "e2b"
    domains: ClassVar[tuple[str, ...]] = (_DOMAIN, "e2b.app", "e2b.dev")

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.api_key = new_api_key()
        self.sandboxes_table = Sandboxes(ground)
        self._control = Control(self)
        self._process = ProcessService(self)
        self._filesystem = FilesystemService(self)
        self._files = Files(self)
        self._ports = PortProxy()
        self._tasks: set[asyncio.Task[Any]] = set()
        app = web.Application(
            middlewares=[self._edge(), self._control.middleware()], client_max_size=_LARGEST_BODY
        )
        self._control.add_routes(app)
        self._server = HttpServer(
            app,
            refusal=error_answer,
            passed_on=self._is_passed_on,
            answered=partial(ground.answered, self.name),
            allow_remote=ground.settings.allow_remote,
        )

    async def start(self, address: Address) -> None:
        self._address = address
        await self._server.start()

    def connection(self) -> asyncio.BaseProtocol:
        return self._server.connection()

    def environment(self, *, plain: bool) -> dict[str, str]:
        url = self._address.url
        found = {
            "E2B_API_KEY": self.api_key,
            "E2B_DOMAIN": _DOMAIN,
            "E2B_API_URL": url,
            "E2B_SANDBOX_URL": url,
        }
        return found if plain else {**found, **self.ground.proxy_environment()}

    def sandboxes(self) -> list[dict[str, Any]]:
        return [
            {
                "sandbox_id": sandbox.sandbox_id,
                "state": sandbox.state,
                "metadata": sandbox.metadata,
                "started_at": sandbox.started_at,
                "end_at": sandbox.end_at,
            }
            for sandbox in self.sandboxes_table.table.values()
        ]

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start work nobody waits for; what fails then is a sandbox that has gone meanwhile."""

        async def quietly() -> None:
            try:
                await work
            except (LowtideError, NotFound, RpcError):
                return

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.sandboxes_table.aclose()
        await self._server.aclose()
        await self._ports.aclose()

    # ------------------------------------------------------------ the edge

    def _edge(self) -> Any:
        @web.middleware
        async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
            meant = self._meant(request)
            if meant is None:
                return await handler(request)
            return await self._into(request, *meant)

        return edge

    def _is_passed_on(self, request: web.Request) -> bool:
        meant = self._meant(request)
        return meant is not None and meant[1] != _ENVD

    def _meant(self, request: web.Request) -> tuple[str, int] | None:
        """Which sandbox and port the request is for; None: the control plane."""
        if through_proxy(request):
            found = _PORT_HOST.match(request.host)
            if found:
                return found[2], int(found[1])
        sandbox_id = request.headers.get("E2b-Sandbox-Id")
        if sandbox_id:
            port = request.headers.get("E2b-Sandbox-Port", "")
            number = whole_number(port)
            return sandbox_id, _ENVD if number is None else number
        if request.path == "/files" and "signature" in request.query:
            signed = self._files.signed_sandbox(request)
            return (signed.sandbox_id if signed else "unknown"), _ENVD
        return None

    async def _into(self, request: web.Request, sandbox_id: str, port: int) -> web.StreamResponse:
        try:
            sandbox = await self.sandboxes_table.running(sandbox_id)
        except NotFound:
            return _gone(sandbox_id)
        try:
            if port == _ENVD:
                return await self._envd(request, sandbox)
            refused = self._refused_traffic(request, sandbox)
            if refused is not None:
                return refused
            if port == interpreter.PORT and sandbox.interpreter is not None:
                await sandbox.interpreter.ready()
            if sandbox.cut.is_set():  # it ended under the request
                drop(request)
                raise asyncio.CancelledError
            return await self._port(request, sandbox, port)
        except NotFound:
            return _gone(sandbox_id)
        except LowtideError as error:
            if sandbox.cut.is_set() or sandbox.sandbox_id not in self.sandboxes_table.table:
                return _gone(sandbox_id)
            return web.json_response({"code": 500, "message": str(error)}, status=500)

    async def _envd(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        path = request.path
        self.ground.requests.note("e2b", f"envd {path}", {"sandbox_id": sandbox.sandbox_id})
        if path == "/health":
            return web.Response(status=204)
        facts = {**sandbox.metadata, "sandbox_id": sandbox.sandbox_id, "operation": f"envd {path}"}
        if self.ground.faults.take(FaultName.STALE_TOKEN, "e2b", facts):
            return web.json_response({"code": 401, "message": "unauthorized access"}, status=401)
        if path == "/files":
            return await self._files.call(request, sandbox)
        token = request.headers.get("X-Access-Token", "")
        if sandbox.envd_token and not hmac.compare_digest(token.encode(), sandbox.envd_token.encode()):
            message = (
                "unauthorized access, please provide a valid access token or method signing if supported"
            )
            return web.json_response({"code": 401, "message": message}, status=401)
        if path == "/envs":
            return web.json_response(sandbox.environment)
        if path == "/metrics":
            from lowtide.emulators.e2b.metrics import sample

            await sample(self.ground, sandbox)
            return web.json_response(sandbox.metrics[-1] if sandbox.metrics else {})
        _, service, method = ([*path.split("/"), "", ""])[:3]
        try:
            if service == "process.Process":
                return await self._process.call(method, request, sandbox)
            if service == "filesystem.Filesystem":
                return await self._filesystem.call(method, request, sandbox)
        except RpcError as error:
            return connect.unary_error(error)
        except Malformed as error:
            return connect.unary_error(RpcError("invalid_argument", str(error)))
        return web.json_response({"code": 404, "message": "not found"}, status=404)

    def _refused_traffic(self, request: web.Request, sandbox: Sandbox) -> web.Response | None:
        if sandbox.traffic_token is None:
            return None
        given = request.headers.get("E2b-Traffic-Access-Token", "")
        if hmac.compare_digest(given.encode(), sandbox.traffic_token.encode()):
            return None
        message = "traffic access token is missing or wrong"
        return web.json_response(
            {"code": 403, "sandboxId": sandbox.sandbox_id, "message": message}, status=403
        )

    async def _port(self, request: web.Request, sandbox: Sandbox, port: int) -> web.StreamResponse:
        headers = {}
        mask = sandbox.network.get("maskRequestHost")
        if isinstance(mask, str):
            headers["Host"] = mask.replace("${PORT}", str(port))
        elif not through_proxy(request):
            headers["Host"] = f"localhost:{port}"
        try:
            if not 1 <= port <= 65535:
                raise PortClosed
            url = await self.ground.backing.url(sandbox.backing, port)
            return await self._ports.forward(request, url.url, headers=headers, drop=_EDGE_HEADERS)
        except PortClosed:
            if sandbox.cut.is_set():  # it ended under the request
                drop(request)
                raise asyncio.CancelledError from None
            message = "The sandbox is running but port is not open"
            body = {"sandboxId": sandbox.sandbox_id, "message": message, "port": port, "code": 502}
            return web.json_response(body, status=502)


def _gone(sandbox_id: str) -> web.Response:
    body = {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}
    return web.json_response(body, status=502)
