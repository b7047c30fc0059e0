"""E2B's control plane: the REST calls in both path generations, with faults on demand."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from aiohttp import web

from lowtide.emulators.e2b.answers import created, described_snapshot, listed, timestamp
from lowtide.emulators.e2b.metrics import sample
from lowtide.emulators.e2b.model import (
    LONGEST_TIMEOUT_SECONDS,
    TEMPLATES,
    BadRequest,
    Conflict,
    NotFound,
    Sandbox,
    checked_timeout,
)
from lowtide.emulators.e2b.templates import UPLOADS
from lowtide.emulators.faults import FaultName
from lowtide.emulators.fields import (
    FLAG,
    LIST_OF_OBJECTS,
    LIST_OF_TEXT,
    OBJECT,
    TEXT,
    TEXTS,
    check_fields,
    whole,
)
from lowtide.emulators.request_check import LARGEST_WHOLE_NUMBER, json_object, query_number
from lowtide.emulators.web import drop
from lowtide.errors import LowtideError, ResourceExhaustedError

if TYPE_CHECKING:
    from lowtide.emulators.e2b import E2BEmulator
    from lowtide.emulators.web import Handler

_PAGE = 100
_REMEMBERED_KEYS = 10_000


_SECONDS = whole(0, int(LONGEST_TIMEOUT_SECONDS))
_NEW_SANDBOX = {
    "templateID": TEXT,
    "timeout": _SECONDS,
    "autoPause": FLAG,
    "autoPauseMemory": FLAG,
    "autoResume": OBJECT,
    "secure": FLAG,
    "allow_internet_access": FLAG,
    "network": OBJECT,
    "metadata": TEXTS,
    "envVars": TEXTS,
    "mcp": OBJECT,
    "iam": OBJECT,
    "volumeMounts": LIST_OF_OBJECTS,
}
_RUNNING = {
    "timeout": _SECONDS,
    "duration": whole(0, 3600),
    "autoPause": FLAG,
    "memory": FLAG,
    "requireHealthyGuest": FLAG,
}
_NETWORK = {
    "allowOut": LIST_OF_TEXT,
    "denyOut": LIST_OF_TEXT,
    "dnsServers": LIST_OF_TEXT,
    "allow_internet_access": FLAG,
    "allowPublicTraffic": FLAG,
    "maskRequestHost": TEXT,
}


class Control:
    def __init__(self, emulator: E2BEmulator) -> None:
        self.emulator = emulator
        self.sandboxes = emulator.sandboxes_table
        self.ground = emulator.ground
        self._replies: dict[str, tuple[str, asyncio.Future[dict[str, Any]]]] = {}

    def add_routes(self, app: web.Application) -> None:
        add = app.router.add_route
        for prefix in ("", "/v2"):
            add("POST", f"{prefix}/sandboxes", self._create)
            add("GET", f"{prefix}/sandboxes", self._list)
            add("POST", f"{prefix}/sandboxes/{{id}}/connect", self._connect)
            add("POST", f"{prefix}/sandboxes/{{id}}/resume", self._connect)
            add("GET", f"{prefix}/sandboxes/{{id}}", self._info)
            add("DELETE", f"{prefix}/sandboxes/{{id}}", self._kill)
            add("POST", f"{prefix}/sandboxes/{{id}}/timeout", self._set_timeout)
            add("POST", f"{prefix}/sandboxes/{{id}}/refreshes", self._refresh)
            add("POST", f"{prefix}/sandboxes/{{id}}/pause", self._pause)
            add("POST", f"{prefix}/sandboxes/{{id}}/snapshots", self._snapshot)
            add("POST", f"{prefix}/sandboxes/{{id}}/fork", self._fork)
            add("GET", f"{prefix}/sandboxes/{{id}}/metrics", self._metrics)
            add("PUT", f"{prefix}/sandboxes/{{id}}/network", self._network)
            add("GET", f"{prefix}/snapshots", self._snapshots)
            add("DELETE", f"{prefix}/templates/{{id}}", self._delete_template)
        add("GET", "/templates/aliases/{alias}", self._alias)
        add("GET", "/health", self._health)
        self.sandboxes.templates.add_routes(app)

    def middleware(self) -> Any:
        @web.middleware
        async def with_key(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = request.headers.get("X-API-KEY", "")
            if request.path != "/health":
                operation = _operation(request)
                facts = {"operation": operation, "sandbox_id": request.match_info.get("id", "")}
                self.ground.requests.note("e2b", operation, {"sandbox_id": facts["sandbox_id"]})
                signed = request.path.startswith(UPLOADS)  # it has a token of its own
                if not signed and not hmac.compare_digest(given.encode(), self.emulator.api_key.encode()):
                    return _error(
                        401,
                        "Invalid API key, please visit https://e2b.dev/docs/api-key for more information.",
                    )
                if self._fault(FaultName.STALE_TOKEN, facts):
                    return _error(401, "Invalid API key")
                if fault := self._fault(FaultName.RATE_LIMIT, facts):
                    return _error(429, "Rate limit exceeded", {"Retry-After": f"{fault.seconds or 1:g}"})
                if fault := self._fault(FaultName.UNAVAILABLE, facts):
                    return _error(fault.status or 503, "Service unavailable")
            try:
                # What was begun is done to its end, whether or not the caller is still there to hear of it.
                doing = asyncio.ensure_future(handler(request))
                doing.add_done_callback(lambda done: done.cancelled() or done.exception())
                return await asyncio.shield(doing)
            except NotFound as error:
                return _error(404, str(error))
            except Conflict as error:
                return _error(409, str(error))
            except BadRequest as error:
                return _error(400, str(error))
            except ResourceExhaustedError as error:
                return _error(429, f"you have reached the maximum number of concurrent sandboxes: {error}")
            except web.HTTPException as error:
                return _error(error.status, error.reason)
            except LowtideError as error:
                return _error(500, f"Failed to place sandbox: {error}")

        return with_key

    def _fault(self, name: FaultName, facts: dict[str, str]) -> Any:
        return self.ground.faults.take(name, "e2b", facts)

    def _facts(self, sandbox_id: str) -> dict[str, str]:
        sandbox = self.sandboxes.table.get(sandbox_id)
        return {**(sandbox.metadata if sandbox else {}), "sandbox_id": sandbox_id}

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="Health check successful")

    # ------------------------------------------------------------ create

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await json_object(request)
        check_fields(body, _NEW_SANDBOX, required=("templateID",))
        facts = {**(body.get("metadata") or {}), "operation": "create"}
        if fault := self._fault(FaultName.CREATE_FAILS, facts):
            return _error(fault.status or 500, "Failed to place sandbox")
        if fault := self._fault(FaultName.CREATE_SLOW, facts):
            await asyncio.sleep(fault.seconds or 5)
        described = await self._create_once(request.headers.get("Idempotency-Key"), body)
        if fault := self._fault(FaultName.CREATE_LOST, facts):
            return _error(fault.status or 504, "Gateway timeout")
        if self._fault(FaultName.CREATE_DROPPED, facts):
            drop(request)
            raise asyncio.CancelledError
        return web.json_response(described, status=201)

    async def _create_once(self, key: str | None, body: dict[str, Any]) -> dict[str, Any]:
        if key is None:
            return await self._make(body)
        if not 1 <= len(key) <= 255:
            raise BadRequest("Idempotency-Key has 1 to 255 characters")
        asked = json.dumps(body, sort_keys=True)
        if key in self._replies:
            before, reply = self._replies[key]
            if before != asked:
                raise Conflict("this Idempotency-Key was used with another request")
            return await asyncio.shield(reply)
        reply = asyncio.get_running_loop().create_future()
        self._replies[key] = (asked, reply)
        try:
            described = await self._make(body)
        except BaseException as error:
            del self._replies[key]
            reply.set_exception(error if isinstance(error, Exception) else NotFound("the create was cut off"))
            reply.exception()
            raise
        reply.set_result(described)
        while len(self._replies) > _REMEMBERED_KEYS:
            self._replies.pop(next(iter(self._replies)))
        return described

    async def _make(self, body: dict[str, Any]) -> dict[str, Any]:
        sandbox = await self.sandboxes.create(body)
        if self._fault(FaultName.CREATE_ERROR_STATE, sandbox.metadata):
            sandbox.broken = True
        return created(sandbox)

    # ------------------------------------------------------------ look

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        wanted = dict(parse_qsl(query.get("metadata", ""), keep_blank_values=True))
        states = [s for given in query.getall("state", []) for s in given.split(",") if s]
        if not states:
            states = ["running", "paused"] if request.path.startswith("/v2") else ["running"]
        after = timestamp(query["startedAfter"]) if "startedAfter" in query else None
        template = query.get("template")
        limit = query_number(request, "limit", _PAGE, lowest=1, largest=_PAGE)
        lag = self._fault(FaultName.LIST_LAGS, {"operation": "list"})
        now = self.ground.clock.now()
        since = now - (lag.seconds or 5) if lag else None
        extra = [s for at, s in self.sandboxes.ended.values() if since is not None and at > since]

        def fits(sandbox: Sandbox) -> bool:
            if since is not None and sandbox.started_at > since and sandbox not in extra:
                return False
            return (
                sandbox.state in states
                and all(sandbox.metadata.get(key) == value for key, value in wanted.items())
                and (after is None or sandbox.started_at > after - 0.001)
                and (template is None or template in (sandbox.template_id, sandbox.alias))
            )

        found = sorted(
            self.sandboxes.matching(fits, extra),
            key=lambda s: (s.started_at, s.sandbox_id),
            reverse=query.get("order", "desc") != "asc",
        )
        token = query.get("nextToken")
        if token:
            ids = [s.sandbox_id for s in found]
            found = found[ids.index(token) + 1 :] if token in ids else []
        page = found[:limit]
        headers = {"x-next-token": page[-1].sandbox_id} if len(found) > limit and page else {}
        return web.json_response([listed(sandbox) for sandbox in page], headers=headers)

    async def _info(self, request: web.Request) -> web.Response:
        sandbox = self.sandboxes.get(request.match_info["id"])
        described = {
            **listed(sandbox),
            "domain": None,
            "allowInternetAccess": sandbox.allow_internet_access,
            "network": sandbox.network or None,
            "lifecycle": {
                "autoResume": sandbox.lifecycle.auto_resume,
                "onTimeout": "pause" if sandbox.lifecycle.auto_pause else "kill",
            },
        }
        if sandbox.envd_token:
            described["envdAccessToken"] = sandbox.envd_token
        return web.json_response({k: v for k, v in described.items() if v is not None})

    async def _metrics(self, request: web.Request) -> web.Response:
        sandbox = self.sandboxes.get(request.match_info["id"])
        await sample(self.ground, sandbox)
        latest = LARGEST_WHOLE_NUMBER
        start = query_number(request, "start", 0, lowest=0, largest=latest)
        end = query_number(request, "end", latest, lowest=0, largest=latest)
        found = [metric for metric in sandbox.metrics if start <= metric["timestampUnix"] <= end]
        return web.json_response(found)

    # ------------------------------------------------------------ change

    async def _kill(self, request: web.Request) -> web.StreamResponse:
        sandbox_id = request.match_info["id"]
        facts = self._facts(sandbox_id)
        if fault := self._fault(FaultName.KILL_FAILS, facts):
            return _error(fault.status or 500, "Error killing sandbox")
        if fault := self._fault(FaultName.KILL_HANGS, facts):
            await asyncio.sleep(fault.seconds or 60)
        if self._fault(FaultName.KILL_IGNORED, facts):
            return web.Response(status=204)
        await self.sandboxes.kill(sandbox_id)
        return web.Response(status=204)

    async def _connect(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, _RUNNING)
        timeout = checked_timeout(body["timeout"]) if body.get("timeout") is not None else None
        reboot = body.get("memory") is False
        sandbox, resumed = await self.sandboxes.connect(request.match_info["id"], timeout, reboot=reboot)
        return web.json_response(created(sandbox), status=201 if resumed else 200)

    async def _set_timeout(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, _RUNNING, required=("timeout",))
        self.sandboxes.set_timeout(request.match_info["id"], checked_timeout(body["timeout"]))
        return web.Response(status=204)

    async def _refresh(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        sandbox = self.sandboxes.get(request.match_info["id"])
        check_fields(body, _RUNNING)
        seconds = checked_timeout(body.get("duration", 15))
        if self.ground.clock.now() + seconds > sandbox.end_at:
            self.sandboxes.set_timeout(sandbox.sandbox_id, seconds)
        return web.Response(status=204)

    async def _pause(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, _RUNNING)
        await self.sandboxes.pause(request.match_info["id"], keep_memory=body.get("memory") is not False)
        return web.Response(status=204)

    async def _fork(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, {**_RUNNING, "count": whole(1, 20)})
        timeout = body.get("timeout")
        made = await self.sandboxes.fork(request.match_info["id"], body.get("count") or 1, timeout)
        answers = [
            {"error": {"code": 500, "message": str(one)}}
            if isinstance(one, Exception)
            else {"sandbox": created(one)}
            for one in made
        ]
        return web.json_response(answers, status=201)

    async def _network(self, request: web.Request) -> web.Response:
        sandbox = self.sandboxes.get(request.match_info["id"])
        body = await json_object(request)
        check_fields(body, _NETWORK)
        kept = {k: v for k, v in sandbox.network.items() if k in ("allowPublicTraffic", "maskRequestHost")}
        sandbox.network = {**kept, **body}
        return web.Response(status=204)

    # ------------------------------------------------------------ snapshots

    async def _snapshot(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, {"name": TEXT, "memory": FLAG})
        made = await self.sandboxes.snapshot(request.match_info["id"], body.get("name"))
        return web.json_response(described_snapshot(made), status=201)

    async def _snapshots(self, request: web.Request) -> web.Response:
        query = request.query
        found = [
            s
            for s in self.sandboxes.snapshots.values()
            if query.get("sandboxID") in (None, s.sandbox_id) and query.get("name") in (None, s.name)
        ]
        found.sort(key=lambda s: s.created_at, reverse=True)
        token = query.get("nextToken")
        if token:
            ids = [s.snapshot_id for s in found]
            found = found[ids.index(token) + 1 :] if token in ids else []
        limit = query_number(request, "limit", _PAGE, lowest=1, largest=_PAGE)
        page = found[:limit]
        headers = {"x-next-token": page[-1].snapshot_id} if len(found) > limit and page else {}
        return web.json_response([described_snapshot(s) for s in page], headers=headers)

    async def _alias(self, request: web.Request) -> web.Response:
        """What `Template.exists` asks. The templates that are there are everybody's."""
        alias = request.match_info["alias"]
        built = self.sandboxes.templates.find(alias)
        template = built.template_id if built is not None else TEMPLATES.get(alias)
        if template is None:
            raise NotFound(f"template alias {alias!r} not found")
        return web.json_response({"templateID": template, "public": built is None})

    async def _delete_template(self, request: web.Request) -> web.Response:
        await self.sandboxes.delete_snapshot(request.match_info["id"])
        return web.Response(status=204)


def new_api_key() -> str:
    return "e2b_" + secrets.token_hex(20)


def _operation(request: web.Request) -> str:
    name = getattr(request.match_info.handler, "__name__", "unknown")
    return name.strip("_").replace("_", "-")


def error_answer(request: web.Request, status: int, message: str) -> web.Response:
    return _error(status, message)


def _error(code: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"code": code, "message": message}, status=code, headers=headers)
