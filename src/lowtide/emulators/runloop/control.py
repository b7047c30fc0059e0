"""The calls about devboxes, snapshots and blueprints themselves."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.faults import Fault, FaultName
from lowtide.emulators.fields import LIST_OF_TEXT, TEXT, TEXTS, check_fields, seconds
from lowtide.emulators.request_check import json_object
from lowtide.emulators.runloop.launch import new_tunnel
from lowtide.emulators.runloop.listing import page
from lowtide.emulators.runloop.model import OVER, Devbox, Refused, Snapshot, Status, new_id
from lowtide.emulators.web import drop

if TYPE_CHECKING:
    from lowtide.emulators.runloop import RunloopEmulator

_HOLD_SECONDS = 25.0
_REMEMBERED_REQUESTS = 10_000
_SECONDS = seconds(60)


class Control:
    def __init__(self, emulator: RunloopEmulator) -> None:
        self.emulator = emulator
        self.ground = emulator.ground
        self.devboxes = emulator.devboxes
        self.blueprints = emulator.blueprints
        self._made: dict[str, Devbox] = {}

    def add_routes(self, app: web.Application) -> None:
        add = app.router.add_route
        add("POST", "/v1/devboxes", self.create)
        add("GET", "/v1/devboxes", self.list)
        add("POST", "/v1/devboxes/create_and_await_running", self.create_and_wait)
        add("GET", "/v1/devboxes/disk_snapshots", self.list_snapshots)
        snapshot = "/v1/devboxes/disk_snapshots/{snapshot}"
        add("POST", snapshot, self.update_snapshot)
        add("GET", f"{snapshot}/status", self.snapshot_status)
        add("POST", f"{snapshot}/delete", self.delete_snapshot)
        one = "/v1/devboxes/{id}"
        add("GET", one, self.retrieve)
        add("POST", one, self.update)
        for verb in ("shutdown", "suspend", "resume", "keep_alive", "wait_for_status", "snapshot_disk"):
            add("POST", f"{one}/{verb}", getattr(self, verb))
        add("POST", f"{one}/snapshot_disk_async", self.snapshot_disk_async)
        add("POST", f"{one}/enable_tunnel", self.enable_tunnel)
        add("POST", f"{one}/remove_tunnel", self.remove_tunnel)
        add("POST", f"{one}/create_ssh_key", self.create_ssh_key)
        add("GET", f"{one}/logs", self.logs)
        add("GET", f"{one}/usage", self.usage)
        add("POST", "/v1/blueprints", self.create_blueprint)
        add("GET", "/v1/blueprints", self.list_blueprints)
        add("GET", "/v1/blueprints/list_public", self.list_public_blueprints)
        add("GET", "/v1/blueprints/{blueprint}", self.get_blueprint)
        add("GET", "/v1/blueprints/{blueprint}/logs", self.blueprint_logs)
        add("POST", "/v1/blueprints/{blueprint}/delete", self.delete_blueprint)

    def _fault(self, name: FaultName, facts: dict[str, str]) -> Fault | None:
        return self.ground.faults.take(name, "runloop", facts)

    def _one(self, request: web.Request) -> Devbox:
        return self.devboxes.get(request.match_info["id"])

    # ------------------------------------------------------------ create, look

    async def _create(self, request: web.Request) -> Devbox:
        """It goes on when the caller has left."""
        asked = await json_object(request)
        making = asyncio.ensure_future(self._create_once(request, asked))
        making.add_done_callback(lambda made: made.cancelled() or made.exception())
        return await asyncio.shield(making)

    async def _create_once(self, request: web.Request, asked: dict[str, Any]) -> Devbox:
        """For each request id: the SDK sends a create that was not answered again with the same one."""
        metadata = asked.get("metadata")
        check_fields(asked, {"metadata": TEXTS, "name": TEXT})
        facts = {**(metadata or {}), "operation": "create", "name": asked.get("name") or ""}
        if fault := self._fault(FaultName.CREATE_FAILS, facts):
            raise Refused(fault.status or 500, "Failed to create devbox")
        if fault := self._fault(FaultName.CREATE_SLOW, facts):
            await asyncio.sleep(fault.seconds or 5)
        key = request.headers.get("X-Request-ID")
        devbox = self._made.get(key) if key else None
        if devbox is None:
            slow = self._fault(FaultName.START_SLOW, facts)
            broken = self._fault(FaultName.CREATE_ERROR_STATE, facts)
            devbox = self.devboxes.create(
                asked, slow=(slow.seconds or 5) if slow else 0.0, broken=broken is not None
            )
            if key:
                self._made[key] = devbox
                while len(self._made) > _REMEMBERED_REQUESTS:
                    self._made.pop(next(iter(self._made)))
        if fault := self._fault(FaultName.CREATE_LOST, facts):
            raise Refused(fault.status or 504, "Gateway Timeout")
        if self._fault(FaultName.CREATE_DROPPED, facts):
            drop(request)
            raise asyncio.CancelledError
        return devbox

    async def create(self, request: web.Request) -> web.Response:
        return web.json_response((await self._create(request)).view())

    async def create_and_wait(self, request: web.Request) -> web.Response:
        devbox = await self._create(request)
        await self.devboxes.wait(devbox, (Status.RUNNING, *OVER), _HOLD_SECONDS)
        return web.json_response(devbox.view())

    async def retrieve(self, request: web.Request) -> web.Response:
        return web.json_response(self._one(request).view())

    async def list(self, request: web.Request) -> web.Response:
        found = list(self.devboxes.table.values())
        if lag := self._fault(FaultName.LIST_LAGS, {"operation": "list"}):
            since = self.ground.clock.now() - (lag.seconds or 5)
            found = [one for one in found if one.created_at <= since]
        if status := request.query.get("status"):
            found = [one for one in found if one.status == status]
        found.reverse()
        chosen, more = page(request, [(one.devbox_id, one) for one in found])
        shown = [one.view() for one in chosen]
        return web.json_response({"devboxes": shown, "has_more": more, "total_count": len(found)})

    async def update(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"name": TEXT, "metadata": TEXTS})
        devbox = self._one(request)
        devbox.name = asked.get("name") or devbox.name
        if asked.get("metadata") is not None:
            devbox.metadata = dict(asked["metadata"])
        return web.json_response(devbox.view())

    async def wait_for_status(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"statuses": LIST_OF_TEXT, "timeout_seconds": _SECONDS}, required=("statuses",))
        devbox = self._one(request)
        given = asked.get("timeout_seconds")
        if not await self.devboxes.wait(devbox, asked["statuses"], _HOLD_SECONDS if given is None else given):
            raise Refused(408, "the devbox has not reached any of the statuses")
        return web.json_response(devbox.view())

    # ------------------------------------------------------------ change

    async def shutdown(self, request: web.Request) -> web.Response:
        devbox = self._one(request)
        if fault := self._fault(FaultName.KILL_FAILS, devbox.facts):
            raise Refused(fault.status or 500, "Failed to shut down devbox")
        if fault := self._fault(FaultName.KILL_HANGS, devbox.facts):
            await asyncio.sleep(fault.seconds or 60)
        if not self._fault(FaultName.KILL_IGNORED, devbox.facts):
            await self.devboxes.shutdown(devbox, force=request.query.get("force") == "true")
        return web.json_response(devbox.view())

    async def suspend(self, request: web.Request) -> web.Response:
        devbox = self._one(request)
        await self.devboxes.suspend(devbox)
        return web.json_response(devbox.view())

    async def resume(self, request: web.Request) -> web.Response:
        devbox = self._one(request)
        before = {**devbox.view()}
        await self.devboxes.resume(devbox)
        return web.json_response(before)

    async def keep_alive(self, request: web.Request) -> web.Response:
        self.devboxes.keep_alive(self._one(request))
        return web.json_response({})

    # ------------------------------------------------------------ tunnels, keys, logs

    async def enable_tunnel(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        devbox = self._one(request)
        if devbox.status in OVER:
            raise Refused(400, f"Devbox {devbox.devbox_id} is {devbox.status}")
        if devbox.tunnel is None:
            devbox.tunnel = new_tunnel(asked, self.ground.clock.now())
        return web.json_response(devbox.tunnel.view())

    async def remove_tunnel(self, request: web.Request) -> web.Response:
        self._one(request).tunnel = None
        return web.json_response({})

    async def create_ssh_key(self, request: web.Request) -> web.Response:
        """A key nothing listens for: there is no SSH server in the emulator."""
        devbox = self._one(request)
        key = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{secrets.token_hex(32)}\n-----END OPENSSH PRIVATE KEY-----\n"
        told = {
            "id": new_id("key"),
            "ssh_private_key": key,
            "ssh_user": "user",
            "url": f"{devbox.devbox_id}.invalid",
        }
        return web.json_response(told)

    async def logs(self, request: web.Request) -> web.Response:
        devbox, wanted = self._one(request), request.query.get("execution_id")
        found = [line for line in devbox.logs if wanted in (None, line.get("cmd_id"))]
        return web.json_response({"logs": found})

    async def usage(self, request: web.Request) -> web.Response:
        devbox = self._one(request)
        seconds = round((devbox.ended_at or self.ground.clock.now()) - devbox.created_at)
        told = {
            "id": devbox.devbox_id,
            "start_time_ms": round(devbox.created_at * 1000),
            "status": str(devbox.status),
            "total_active_seconds": seconds,
            "total_elapsed_seconds": seconds,
            **dict.fromkeys(("disk_gb_seconds", "memory_gb_seconds", "vcpu_seconds"), 0),
        }
        return web.json_response(told)

    # ------------------------------------------------------------ snapshots

    async def snapshot_disk_async(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        made, _ = self.devboxes.snapshots.take(self._one(request), asked)
        return web.json_response(made.view())

    async def snapshot_disk(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        made, taking = self.devboxes.snapshots.take(self._one(request), asked)
        await asyncio.shield(taking)
        if made.status == "error":
            raise Refused(400, made.error or "the snapshot could not be taken")
        return web.json_response(made.view())

    def _snapshot(self, request: web.Request) -> Snapshot:
        return self.devboxes.snapshots.get(request.match_info["snapshot"])

    async def snapshot_status(self, request: web.Request) -> web.Response:
        snapshot = self._snapshot(request)
        told = {"status": snapshot.status, "snapshot": snapshot.view(), "error_message": snapshot.error}
        return web.json_response({key: value for key, value in told.items() if value is not None})

    async def update_snapshot(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"name": TEXT, "commit_message": TEXT, "metadata": TEXTS})
        snapshot = self._snapshot(request)
        snapshot.name = asked.get("name") or snapshot.name
        snapshot.commit_message = asked.get("commit_message") or snapshot.commit_message
        if asked.get("metadata") is not None:
            snapshot.metadata = dict(asked["metadata"])
        return web.json_response(snapshot.view())

    async def delete_snapshot(self, request: web.Request) -> web.Response:
        await self.devboxes.snapshots.delete(self._snapshot(request))
        return web.json_response({})

    async def list_snapshots(self, request: web.Request) -> web.Response:
        devbox = request.query.get("devbox_id")
        found = [
            one
            for one in reversed(self.devboxes.snapshots.table.values())
            if one.status in ("in_progress", "complete") and devbox in (None, one.source_id)
        ]
        chosen, more = page(request, [(one.snapshot_id, one) for one in found])
        shown = [one.view() for one in chosen]
        return web.json_response({"snapshots": shown, "has_more": more, "total_count": len(found)})

    # ------------------------------------------------------------ blueprints

    async def create_blueprint(self, request: web.Request) -> web.Response:
        return web.json_response(self.blueprints.create(await json_object(request)).view())

    async def get_blueprint(self, request: web.Request) -> web.Response:
        return web.json_response(self.blueprints.get(request.match_info["blueprint"]).view())

    async def blueprint_logs(self, request: web.Request) -> web.Response:
        blueprint = self.blueprints.get(request.match_info["blueprint"])
        told = {"blueprint_id": blueprint.blueprint_id, "logs": blueprint.log}
        return web.json_response(told)

    async def delete_blueprint(self, request: web.Request) -> web.Response:
        self.blueprints.delete(self.blueprints.get(request.match_info["blueprint"]))
        return web.json_response({})

    async def list_blueprints(self, request: web.Request) -> web.Response:
        return self._blueprints(request, public=False)

    async def list_public_blueprints(self, request: web.Request) -> web.Response:
        return self._blueprints(request, public=True)

    def _blueprints(self, request: web.Request, *, public: bool) -> web.Response:
        name = request.query.get("name")
        found = [
            one
            for one in reversed(self.blueprints.table.values())
            if not one.deleted and name in (None, one.name) and one.view()["is_public"] is public
        ]
        chosen, more = page(request, [(one.blueprint_id, one) for one in found])
        shown = [one.view() for one in chosen]
        return web.json_response({"blueprints": shown, "has_more": more, "total_count": len(found)})
