"""What the daemon in each sandbox answers: who may ask, which sandbox is meant, and where the calls go."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.daytona.answers import Refused, daemon_error, proxy_error
from lowtide.emulators.daytona.commands import Commands
from lowtide.emulators.daytona.files import Files
from lowtide.emulators.daytona.git import Git
from lowtide.emulators.daytona.information import Information
from lowtide.emulators.daytona.interpreter import Interpreters
from lowtide.emulators.daytona.language_servers import LanguageServers
from lowtide.emulators.daytona.sandbox import Sandbox
from lowtide.emulators.daytona.sessions import Sessions
from lowtide.emulators.daytona.terminals import Terminals
from lowtide.emulators.faults import FaultName
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.daytona import DaytonaEmulator
    from lowtide.emulators.web import Handler

Call = Callable[[web.Request, Sandbox], Awaitable[web.StreamResponse]]
FILE_ERRORS = {
    "ENOENT": (404, "FILE_NOT_FOUND"),
    "too-many": (400, "BAD_REQUEST"),
    "EACCES": (403, "FILE_ACCESS_DENIED"),
    "EPERM": (403, "FILE_ACCESS_DENIED"),
    "ENOTDIR": (400, "INVALID_FILE_PATH"),
    "not-a-directory": (400, "INVALID_FILE_PATH"),
    "is-a-directory": (400, "INVALID_FILE_PATH"),
    "invalid": (400, "INVALID_FILE_PATH"),
    "EISDIR": (400, "INVALID_FILE_PATH"),
    "ENAMETOOLONG": (400, "INVALID_FILE_PATH"),
}


class Toolbox:
    def __init__(self, emulator: DaytonaEmulator) -> None:
        self.emulator = emulator
        self.ground = emulator.ground
        self.sandboxes = emulator.sandboxes_table
        self._files = Files(self)
        self._parts: list[Any] = [
            self._files,
            Commands(self),
            Sessions(self),
            Terminals(self),
            Interpreters(self),
            Git(self),
            LanguageServers(self),
            Information(self),
        ]

    def add_routes(self, app: web.Application, prefix: str) -> None:
        def add(method: str, path: str, call: Call) -> None:
            async def handler(request: web.Request) -> web.StreamResponse:
                return await call(request, request["sandbox"])

            handler.__name__ = getattr(call, "__name__", "call")
            app.router.add_route(method, f"{prefix}/{{id}}{path}", handler)

        for part in self._parts:
            part.add_calls(add)
        app.router.add_route("*", f"{prefix}/{{id}}/{{rest:.*}}", _unknown)

    def middleware(self, prefix: str) -> Any:
        @web.middleware
        async def with_sandbox(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not request.path.startswith(prefix + "/"):
                return await handler(request)
            named = request.match_info.get("id", "")
            operation = getattr(request.match_info.handler, "__name__", "unknown").replace("_", "-")
            self.ground.requests.note("daytona", operation, {"sandbox_id": named})
            try:
                found = self.sandboxes.get(named)
            except Refused as error:
                found = None
                missing = error
            if not self._may(request, found):
                return proxy_error(request, 401, "unauthorized: Bearer token is missing or wrong")
            if found is None:
                return proxy_error(request, 404, str(missing))
            facts = {**found.facts, "operation": operation}
            if self.ground.faults.take(FaultName.STALE_TOKEN, "daytona", facts):
                return proxy_error(request, 401, "unauthorized")
            if fault := self.ground.faults.take(FaultName.UNAVAILABLE, "daytona", facts):
                return proxy_error(request, fault.status or 503, "service unavailable")
            if fault := self.ground.faults.take(FaultName.RATE_LIMIT, "daytona", facts):
                answer = proxy_error(request, 429, "too many requests")
                answer.headers["Retry-After"] = f"{fault.seconds or 1:g}"
                return answer
            return await self._serve(request, handler, found)

        return with_sandbox

    async def _serve(self, request: web.Request, handler: Handler, sandbox: Sandbox) -> web.StreamResponse:
        try:
            request["sandbox"] = self.sandboxes.running(sandbox.sandbox_id)
        except Refused as error:
            return proxy_error(request, error.status, str(error))
        self.sandboxes.touch(sandbox)
        cut = sandbox.cut
        try:
            return await handler(request)
        except Refused as error:
            return daemon_error(request, error.status, str(error), error.code)
        except AgentError as error:
            status, code = FILE_ERRORS.get(error.kind, (500, None))
            return daemon_error(request, status, str(error), code)
        except LowtideError as error:
            if cut.is_set():
                return proxy_error(request, 502, "bad gateway: the sandbox has ended")
            return daemon_error(request, 500, str(error))
        except web.HTTPException as error:
            return daemon_error(request, error.status, error.reason)
        finally:
            self.sandboxes.touch(sandbox)

    def _may(self, request: web.Request, sandbox: Sandbox | None) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.emulator.api_key.encode()):
            return True
        return sandbox is not None and self._files.signed(request, sandbox)

    def vanish(self, sandbox: Sandbox, seconds: float) -> None:
        """The sandbox goes in the middle of what it does."""

        def go() -> None:
            if self.sandboxes.table.get(sandbox.sandbox_id) is sandbox:
                task = asyncio.ensure_future(self.sandboxes.destroy(sandbox, force=True))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

        asyncio.get_running_loop().call_later(seconds, go)


async def _unknown(request: web.Request) -> web.StreamResponse:
    raise Refused(404, "404 page not found")
