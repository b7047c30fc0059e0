"""The catalogue of snapshots: what sandboxes can be created from."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.build import BuildFailed, Built
from lowtide.emulators.daytona.answers import (
    Refused,
    body_of,
    number_in,
    rfc3339,
    stream_log,
    text_of,
    whole_of,
)
from lowtide.emulators.daytona.image_steps import OPENING, image_steps
from lowtide.emulators.daytona.storage import Storage, hashes_of
from lowtide.emulators.dockerfile import CannotBuild
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.daytona.sandbox import Sandbox
    from lowtide.emulators.ground import Ground

DEFAULT = "daytonaio/sandbox:0.8.0"
_GENERAL = {
    DEFAULT: (1, 1, 3),
    "daytona-small": (1, 1, 3),
    "daytona-medium": (2, 4, 8),
    "daytona-large": (4, 8, 10),
}


@dataclass(slots=True, kw_only=True)
class Snapshot:
    snapshot_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    name: str
    image: str | None = None
    general: bool = False
    state: str = "active"
    backing_id: str | None = None
    """None: this machine's own files, as every image is here."""
    cpu: int = 1
    memory: int = 1
    disk: int = 3
    entrypoint: list[str] = field(default_factory=list)
    build: dict[str, Any] | None = None
    source_id: str | None = None
    created_at: float = 0.0
    used_at: float | None = None
    log: list[str] = field(default_factory=list)
    error: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    built: Built | None = None
    """Held until it is deleted."""
    task: asyncio.Task[None] | None = None


class Snapshots:
    def __init__(self, ground: Ground, organization_id: str) -> None:
        self.ground = ground
        self.organization_id = organization_id
        self.storage = Storage(ground, organization_id)
        self._building: set[asyncio.Task[None]] = set()
        now = ground.clock.now()
        general = [
            Snapshot(
                name=name, image=DEFAULT, general=True, cpu=cpu, memory=memory, disk=disk, created_at=now
            )
            for name, (cpu, memory, disk) in _GENERAL.items()
        ]
        self.table: dict[str, Snapshot] = {one.snapshot_id: one for one in general}

    def get(self, name: str) -> Snapshot:
        found = self.table.get(name) or next((s for s in self.table.values() if s.name == name), None)
        if found is None:
            raise Refused(404, f"Snapshot with ID or name {name} not found")
        return found

    def usable(self, name: Any) -> Snapshot:
        """For a create. The service calls an unknown name a bad request."""
        try:
            found = self.get(str(name or DEFAULT))
        except Refused:
            raise Refused(
                400, f"Snapshot {name} not found. Did you add it through the Daytona Dashboard?"
            ) from None
        if found.state != "active":
            raise Refused(400, f"Snapshot {name} is {found.state}")
        found.used_at = self.ground.clock.now()
        return found

    def free_name(self, name: str) -> None:
        if any(one.name == name for one in self.table.values()):
            raise Refused(409, f'Snapshot with name "{name}" already exists for this organization')

    def keep(self, name: str, backing_id: str | None, source: Sandbox) -> Snapshot:
        """What a sandbox was made into."""
        made = Snapshot(
            name=name,
            backing_id=backing_id,
            cpu=source.cpu,
            memory=source.memory,
            disk=source.disk,
            source_id=source.sandbox_id,
            workdir=source.workdir,
            created_at=self.ground.clock.now(),
        )
        self.table[made.snapshot_id] = made
        return made

    # ------------------------------------------------------------ the calls

    def add_routes(self, app: web.Application, prefix: str) -> None:
        add = app.router.add_route
        add("GET", f"{prefix}/snapshots", self.list_snapshots)
        add("POST", f"{prefix}/snapshots", self.create_snapshot)
        add("GET", f"{prefix}/object-storage/push-access", self.push_access)
        for path, method, handler in (
            ("", "GET", self.get_snapshot),
            ("", "DELETE", self.delete_snapshot),
            ("/activate", "POST", self.activate_snapshot),
            ("/deactivate", "POST", self.deactivate_snapshot),
            ("/build-logs", "GET", self.snapshot_build_logs),
            ("/build-logs-url", "GET", self.snapshot_build_logs_url),
        ):
            add(
                method,
                f"{prefix}/snapshots/{{id:[^/]+(?:/(?!activate$|deactivate$|build-logs)[^/]+)*}}{path}",
                handler,
            )

    async def push_access(self, request: web.Request) -> web.Response:
        if self.ground.settings.plain:  # the SDK would not say why it cannot send them
            raise Refused(
                501,
                "local files in an image (add_local_file, add_local_dir, COPY) are not available with --plain: "
                "they are sent over TLS, and nothing tells the SDK whom to trust. Write them with run_commands, or "
                "upload them to the sandbox with fs.upload_file",
            )
        return web.json_response(await self.storage.access())

    async def list_snapshots(self, request: web.Request) -> web.Response:
        query = request.query
        page, limit = number_in(query.get("page", "1"), "page"), number_in(query.get("limit", "100"), "limit")
        found = [
            s
            for s in self.table.values()
            if query.get("name", "") in s.name and query.get("sourceSandboxId") in (None, s.source_id)
        ]
        found.sort(key=lambda s: s.created_at, reverse=query.get("order", "desc") != "asc")
        shown = found[(page - 1) * limit : page * limit]
        pages = -(-len(found) // limit)
        items = [self._described(s) for s in shown]
        return web.json_response({"items": items, "total": len(found), "page": page, "totalPages": pages})

    async def create_snapshot(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        name = text_of(body, "name")
        self.free_name(name)
        build = body.get("buildInfo")
        image = body.get("imageName")
        if (build is None) == (image is None):
            raise Refused(400, "Specify either imageName or buildInfo")
        now = self.ground.clock.now()
        made = Snapshot(
            name=name,
            image=image,
            cpu=whole_of(body.get("cpu"), "cpu", lowest=1) or 1,
            memory=whole_of(body.get("memory"), "memory", lowest=1) or 1,
            disk=whole_of(body.get("disk"), "disk", lowest=1) or 3,
            entrypoint=[str(word) for word in body.get("entrypoint") or []],
            created_at=now,
        )
        if build is not None:
            content = str(build.get("dockerfileContent") or "")
            hashes = hashes_of(build)
            made.build = {
                "dockerfileContent": content,
                "contextHashes": hashes,
                "createdAt": rfc3339(now),
                "updatedAt": rfc3339(now),
                "snapshotRef": f"daytona-{made.snapshot_id}",
            }
            made.state = "building"
            made.task = task = asyncio.get_running_loop().create_task(self._build(made))
            self._building.add(task)
            task.add_done_callback(self._building.discard)
        self.table[made.snapshot_id] = made
        return web.json_response(self._described(made))

    async def built(self, build: dict[str, Any], log: list[str]) -> Built:
        """Follow a recipe with the files that were sent for it. CannotBuild, BuildFailed, LowtideError."""
        log += OPENING
        context = self.storage.contexts(build)
        steps = image_steps(build["dockerfileContent"])
        return await self.ground.builder.build(steps, log=log.append, context=context)

    async def _build(self, made: Snapshot) -> None:
        assert made.build is not None
        try:
            built = await self.built(made.build, made.log)
        except (BuildFailed, CannotBuild, LowtideError) as error:
            made.log.append(f"ERROR: {error}\n")
            made.state, made.error = "build_failed", f"Build failed: {error}"
            return
        if made.snapshot_id not in self.table:
            self.ground.builder.release(built)
            return
        made.built, made.backing_id, made.environment = built, built.snapshot, dict(built.around.environment)
        made.workdir = built.around.workdir
        made.state = "active"

    async def aclose(self) -> None:
        await self.storage.aclose()
        for task in list(self._building):
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)

    async def get_snapshot(self, request: web.Request) -> web.Response:
        return web.json_response(self._described(self.get(request.match_info["id"])))

    async def delete_snapshot(self, request: web.Request) -> web.Response:
        snapshot = self.get(request.match_info["id"])
        if snapshot.general:
            raise Refused(403, "General snapshots cannot be deleted")
        del self.table[snapshot.snapshot_id]
        if snapshot.task is not None:  # others wait for its place
            snapshot.task.cancel()
        if snapshot.built is not None:
            self.ground.builder.release(snapshot.built)
        elif snapshot.backing_id is not None:
            with suppress(LowtideError):  # in use below a sandbox: goes with the emulator
                await self.ground.backing.delete_snapshot(snapshot.backing_id)
        return web.Response(status=200)

    async def activate_snapshot(self, request: web.Request) -> web.Response:
        snapshot = self.get(request.match_info["id"])
        if snapshot.state == "active":
            raise Refused(400, f"Snapshot {snapshot.name} is already active")
        if snapshot.state != "inactive":  # there is nothing that a sandbox could be made from
            raise Refused(400, f"Snapshot {snapshot.name} cannot be activated: its state is {snapshot.state}")
        snapshot.state = "active"
        return web.json_response(self._described(snapshot))

    async def deactivate_snapshot(self, request: web.Request) -> web.Response:
        snapshot = self.get(request.match_info["id"])
        if snapshot.state not in ("active", "inactive"):
            raise Refused(
                400, f"Snapshot {snapshot.name} cannot be deactivated: its state is {snapshot.state}"
            )
        snapshot.state = "inactive"
        return web.Response(status=204)

    async def snapshot_build_logs(self, request: web.Request) -> web.StreamResponse:
        snapshot = self.get(request.match_info["id"])
        return await stream_log(request, snapshot.log, lambda: snapshot.state != "building")

    async def snapshot_build_logs_url(self, request: web.Request) -> web.Response:
        snapshot = self.get(request.match_info["id"])
        base = str(request.url.origin()) + request.path.partition("/snapshots/")[0]
        return web.json_response({"url": f"{base}/snapshots/{snapshot.snapshot_id}/build-logs"})

    def _described(self, snapshot: Snapshot) -> dict[str, Any]:
        described = {
            "id": snapshot.snapshot_id,
            "organizationId": self.organization_id,
            "general": snapshot.general,
            "name": snapshot.name,
            "state": snapshot.state,
            "size": 0,
            "entrypoint": snapshot.entrypoint,
            "cpu": snapshot.cpu,
            "gpu": 0,
            "mem": snapshot.memory,
            "disk": snapshot.disk,
            "errorReason": snapshot.error,
            "createdAt": rfc3339(snapshot.created_at),
            "updatedAt": rfc3339(snapshot.created_at),
            "lastUsedAt": rfc3339(snapshot.used_at) if snapshot.used_at is not None else None,
            "sourceSandboxId": snapshot.source_id,
            "sandboxClass": "container",
            "regionIds": ["us"],
            "ref": f"daytona-{snapshot.snapshot_id}",
        }
        if snapshot.image is not None:
            described["imageName"] = snapshot.image
        if snapshot.build is not None:
            described["buildInfo"] = snapshot.build
        return described
