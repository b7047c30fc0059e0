"""The control plane's calls about sandboxes."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.daytona.answers import (
    Refused,
    body_of,
    control_error,
    number_in,
    rfc3339,
    stream_log,
    strings_of,
    text_of,
)
from lowtide.emulators.daytona.listing import page_of
from lowtide.emulators.daytona.sandbox import Sandbox, SandboxState, described, listed
from lowtide.emulators.faults import Fault, FaultName
from lowtide.emulators.web import drop
from lowtide.errors import LowtideError, ResourceExhaustedError

if TYPE_CHECKING:
    from lowtide.emulators.daytona import DaytonaEmulator
    from lowtide.emulators.web import Handler

_INTERVALS = {"autostop": "stop", "autopause": "pause", "autoarchive": "archive", "autodelete": "delete"}


class Control:
    def __init__(self, emulator: DaytonaEmulator) -> None:
        self.emulator = emulator
        self.ground = emulator.ground
        self.sandboxes = emulator.sandboxes_table
        self._shells: dict[str, tuple[str, float]] = {}  # ssh tokens: sandbox and expiry

    def add_routes(self, app: web.Application, prefix: str) -> None:
        add = app.router.add_route
        add("GET", f"{prefix}/sandbox", self.list)
        add("POST", f"{prefix}/sandbox", self.create)
        add("GET", f"{prefix}/sandbox/paginated", self.list_paginated)
        add("GET", f"{prefix}/sandbox/ssh-access/validate", self.validate_ssh_access)
        one = f"{prefix}/sandbox/{{id}}"
        add("GET", one, self.get)
        add("DELETE", one, self.delete)
        for verb in ("start", "stop", "pause", "archive", "recover", "resize", "snapshot", "fork"):
            add("POST", f"{one}/{verb}", getattr(self, verb))
        add("POST", f"{one}/backup", self.get)
        add("GET", f"{one}/forks", self.forks)
        add("GET", f"{one}/parent", self.parent)
        add("PUT", f"{one}/labels", self.labels)
        add("PUT", f"{one}/secrets", self.secrets)
        add("POST", f"{one}/{{which:{'|'.join(_INTERVALS)}}}/{{minutes}}", self.interval)
        add("POST", f"{one}/ttl/{{minutes}}", self.expiry)
        add("POST", f"{one}/public/{{public}}", self.public)
        add("POST", f"{one}/network-settings", self.network)
        add("POST", f"{one}/last-activity", self.activity)
        add("GET", f"{one}/ports/{{port}}/preview-url", self.preview_url)
        add("GET", f"{one}/ports/{{port}}/signed-preview-url", self.signed_preview_url)
        add("POST", f"{one}/ports/{{port}}/signed-preview-url/{{token}}/expire", self.expire_preview_url)
        add("GET", f"{one}/signing-key", self.signing_key)
        add("POST", f"{one}/signing-key/rotate", self.rotate_signing_key)
        add("GET", f"{one}/build-logs", self.build_logs)
        add("GET", f"{one}/build-logs-url", self.build_logs_url)
        add("GET", f"{one}/toolbox-proxy-url", self.toolbox_url)
        add("POST", f"{one}/ssh-access", self.ssh_access)
        add("DELETE", f"{one}/ssh-access", self.revoke_ssh_access)

    def middleware(self, prefix: str) -> Any:
        @web.middleware
        async def with_key(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not request.path.startswith(prefix + "/") or request.path.startswith(f"{prefix}/socket.io"):
                return await handler(request)
            operation = getattr(request.match_info.handler, "__name__", "unknown").replace("_", "-")
            named = request.match_info.get("id", "")
            facts = {"operation": operation, "sandbox_id": named}
            self.ground.requests.note("daytona", operation, {"sandbox_id": named})
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if request.path != f"{prefix}/health" and not hmac.compare_digest(
                given.encode(), self.emulator.api_key.encode()
            ):
                return control_error(request, 401, "Invalid credentials")
            if self._fault(FaultName.STALE_TOKEN, facts):
                return control_error(request, 401, "Invalid credentials")
            if fault := self._fault(FaultName.RATE_LIMIT, facts):
                headers = {"Retry-After": f"{fault.seconds or 1:g}"}
                return control_error(request, 429, "ThrottlerException: Too Many Requests", headers)
            if fault := self._fault(FaultName.UNAVAILABLE, facts):
                return control_error(request, fault.status or 503, "Service Unavailable")
            try:
                # What was begun is done to its end, whether or not the caller is still there to hear of it.
                doing = asyncio.ensure_future(handler(request))
                doing.add_done_callback(lambda done: done.cancelled() or done.exception())
                return await asyncio.shield(doing)
            except Refused as error:
                return control_error(request, error.status, str(error))
            except ResourceExhaustedError as error:
                return control_error(request, 403, f"Total sandbox limit exceeded: {error}")
            except web.HTTPException as error:
                return control_error(request, error.status, f"Cannot {request.method} {request.path}")
            except LowtideError as error:
                return control_error(request, 500, str(error))

        return with_key

    def _fault(self, name: FaultName, facts: dict[str, str]) -> Fault | None:
        return self.ground.faults.take(name, "daytona", facts)

    def _one(self, request: web.Request) -> Sandbox:
        return self.sandboxes.get(request.match_info["id"])

    def _answer(self, sandbox: Sandbox) -> web.Response:
        return web.json_response(described(sandbox, self.emulator.toolbox_url))

    # ------------------------------------------------------------ create, look

    async def create(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        labels = strings_of(body.get("labels"), "labels")
        facts = {**labels, "operation": "create", "name": str(body.get("name") or "")}
        if fault := self._fault(FaultName.CREATE_FAILS, facts):
            return control_error(request, fault.status or 500, "Failed to create sandbox")
        if fault := self._fault(FaultName.CREATE_SLOW, facts):
            await asyncio.sleep(fault.seconds or 5)
        slow = self._fault(FaultName.START_SLOW, facts)
        broken = self._fault(FaultName.CREATE_ERROR_STATE, facts)
        sandbox = await self.sandboxes.create(
            body,
            slow_start=(slow.seconds or 5) if slow else None,
            broken="the runner could not start the sandbox" if broken else None,
        )
        await self.emulator.created(sandbox)
        if fault := self._fault(FaultName.CREATE_LOST, facts):
            return control_error(request, fault.status or 504, "Gateway Timeout")
        if self._fault(FaultName.CREATE_DROPPED, facts):
            drop(request)
            raise asyncio.CancelledError
        return self._answer(sandbox)

    async def get(self, request: web.Request) -> web.Response:
        return self._answer(self._one(request))

    def _candidates(self) -> list[Sandbox]:
        """What a list looks at; on a bad day that is the past."""
        lag = self._fault(FaultName.LIST_LAGS, {"operation": "list"})
        if lag is None:
            return list(self.sandboxes.table.values())
        since = self.ground.clock.now() - (lag.seconds or 5)
        seen = {s.sandbox_id: s for s in self.sandboxes.table.values() if s.created_at <= since}
        for ended_at, sandbox in self.sandboxes.ended.values():
            if ended_at > since:
                seen[sandbox.sandbox_id] = sandbox
        return list(seen.values())

    def _listed(self, sandbox: Sandbox) -> dict[str, Any]:
        shown = listed(sandbox, self.emulator.toolbox_url)
        if sandbox.sandbox_id not in self.sandboxes.table:  # only a list that lags shows it
            shown |= {"state": str(SandboxState.STARTED), "desiredState": "started"}
        return shown

    async def list(self, request: web.Request) -> web.Response:
        page, cursor = page_of(self._candidates(), request.query)
        return web.json_response({"items": [self._listed(one) for one in page], "nextCursor": cursor})

    async def list_paginated(self, request: web.Request) -> web.Response:
        """The list that SDKs before cursors use."""
        query = request.query
        number, limit = int(query.get("page", "1")), int(query.get("limit", "100"))
        if number < 1 or limit < 1:
            raise Refused(400, "page and limit must be 1 or more")
        found, _ = page_of(self._candidates(), query, limit=1 << 30)
        shown = [
            {**self._listed(one), "env": one.environment, "kvm": False}
            for one in found[(number - 1) * limit : number * limit]
        ]
        pages = -(-len(found) // limit)
        return web.json_response({"items": shown, "total": len(found), "page": number, "totalPages": pages})

    # ------------------------------------------------------------ change

    async def start(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        await self.sandboxes.start(sandbox)
        return self._answer(sandbox)

    async def stop(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        await self.sandboxes.stop(sandbox)
        return self._answer(sandbox)

    async def pause(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        await self.sandboxes.pause(sandbox)
        return self._answer(sandbox)

    async def archive(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        await self.sandboxes.archive(sandbox)
        return self._answer(sandbox)

    async def recover(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        await self.sandboxes.recover(sandbox)
        return self._answer(sandbox)

    async def resize(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        await self.sandboxes.resize(sandbox, await body_of(request))
        return self._answer(sandbox)

    async def snapshot(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        await self.sandboxes.snapshot(sandbox, text_of(await body_of(request), "name"))
        return self._answer(sandbox)

    async def fork(self, request: web.Request) -> web.Response:
        made = await self.sandboxes.fork(self._one(request), (await body_of(request)).get("name"))
        await self.emulator.created(made)
        return self._answer(made)

    async def forks(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        found = [one for one in self.sandboxes.table.values() if one.parent_id == sandbox.sandbox_id]
        return web.json_response([described(one, self.emulator.toolbox_url) for one in found])

    async def parent(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        if sandbox.parent_id is None:
            raise Refused(404, "Sandbox has no parent")
        return self._answer(self.sandboxes.get(sandbox.parent_id))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._one(request)
        facts = {**sandbox.facts, "operation": "delete"}
        if fault := self._fault(FaultName.KILL_FAILS, facts):
            messages = {409: "Sandbox state change in progress", 403: "Forbidden resource"}
            status = fault.status or 500
            return control_error(request, status, messages.get(status, "Failed to delete sandbox"))
        if fault := self._fault(FaultName.KILL_HANGS, facts):
            await asyncio.sleep(fault.seconds or 60)
            sandbox = self._one(request)  # somebody else may have been faster
        if self._fault(FaultName.KILL_IGNORED, facts):
            shown = described(sandbox, self.emulator.toolbox_url)
            return web.json_response({**shown, "state": "destroying", "desiredState": "destroyed"})
        await self.sandboxes.destroy(sandbox)
        return self._answer(sandbox)

    async def labels(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        body = await body_of(request)
        if "labels" not in body:
            raise Refused(400, "labels is required")
        sandbox.labels = strings_of(body["labels"], "labels")
        return web.json_response({"labels": sandbox.labels})

    async def secrets(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        sandbox.secrets = (await body_of(request)).get("secrets") or []
        return self._answer(sandbox)

    async def interval(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        which = _INTERVALS[request.match_info["which"]]
        minutes = number_in(request.match_info["minutes"], "minutes", lowest=-1 if which == "delete" else 0)
        other = {"stop": sandbox.intervals.pause, "pause": sandbox.intervals.stop}.get(which, 0)
        if minutes and other:
            if which == "stop":
                raise Refused(400, "autoStopInterval and autoPauseInterval are mutually exclusive")
            sandbox.intervals.stop = 0
        setattr(sandbox.intervals, which, minutes)
        self.sandboxes.rearm(sandbox)
        return self._answer(sandbox)

    async def expiry(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        minutes = number_in(request.match_info["minutes"], "minutes", lowest=0)
        sandbox.expiry_minutes = minutes
        sandbox.destroy_at = self.ground.clock.now() + minutes * 60 if minutes else None
        self.sandboxes.rearm(sandbox)
        return self._answer(sandbox)

    async def public(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        sandbox.public = request.match_info["public"].lower() == "true"
        return self._answer(sandbox)

    async def network(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        body = await body_of(request)
        known = ("networkBlockAll", "networkAllowList", "domainAllowList")
        sandbox.network |= {key: body[key] for key in known if key in body}
        return self._answer(sandbox)

    async def activity(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        self.sandboxes.touch(sandbox)
        return web.Response(status=201)

    # ------------------------------------------------------------ ways in

    async def preview_url(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        url = await self.emulator.previews.url(sandbox, _port(request))
        return web.json_response(
            {"sandboxId": sandbox.sandbox_id, "url": url, "token": sandbox.preview_token}
        )

    async def signed_preview_url(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        port = _port(request)
        seconds = number_in(request.query.get("expiresInSeconds", "60"), "expiresInSeconds")
        url, token = await self.emulator.previews.signed_url(sandbox, port, seconds)
        answer = {"sandboxId": sandbox.sandbox_id, "port": port, "token": token, "url": url}
        return web.json_response(answer)

    async def expire_preview_url(self, request: web.Request) -> web.Response:
        self.emulator.previews.expire(self._one(request), _port(request), request.match_info["token"])
        return web.Response(status=200)

    async def signing_key(self, request: web.Request) -> web.Response:
        return web.json_response(self._one(request).signing_key)

    async def rotate_signing_key(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        sandbox.signing_key = secrets.token_hex(32)
        return web.json_response(sandbox.signing_key)

    async def toolbox_url(self, request: web.Request) -> web.Response:
        self._one(request)
        return web.json_response({"url": self.emulator.toolbox_url})

    async def ssh_access(self, request: web.Request) -> web.Response:
        """A token that validates; nothing listens for it."""
        sandbox = self._one(request)
        minutes = number_in(request.query.get("expiresInMinutes", "60"), "expiresInMinutes")
        now = self.ground.clock.now()
        token = secrets.token_urlsafe(24)
        self._shells[token] = (sandbox.sandbox_id, now + minutes * 60)
        answer = {
            "id": str(uuid.uuid4()),
            "sandboxId": sandbox.sandbox_id,
            "token": token,
            "expiresAt": rfc3339(now + minutes * 60),
            "createdAt": rfc3339(now),
            "updatedAt": rfc3339(now),
            "sshCommand": f"ssh {token}@127.0.0.1",
        }
        return web.json_response(answer)

    async def revoke_ssh_access(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        given = request.query.get("token")
        for token in [t for t, (owner, _) in self._shells.items() if owner == sandbox.sandbox_id]:
            if given in (None, token):
                del self._shells[token]
        return self._answer(sandbox)

    async def validate_ssh_access(self, request: web.Request) -> web.Response:
        sandbox_id, until = self._shells.get(request.query.get("token", ""), ("", 0.0))
        valid = sandbox_id in self.sandboxes.table and until > self.ground.clock.now()
        return web.json_response({"valid": valid, "sandboxId": sandbox_id if valid else ""})

    # ------------------------------------------------------------ build logs

    async def build_logs_url(self, request: web.Request) -> web.Response:
        sandbox = self._one(request)
        return web.json_response({"url": f"{self.emulator.api_url}/sandbox/{sandbox.sandbox_id}/build-logs"})

    async def build_logs(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._one(request)
        building = (SandboxState.PENDING_BUILD, SandboxState.BUILDING_SNAPSHOT)
        return await stream_log(request, sandbox.build_log, lambda: sandbox.state not in building)


def _port(request: web.Request) -> int:
    return number_in(request.match_info["port"], "port", largest=65_535)
