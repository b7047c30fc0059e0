"""Volumes: files that outlive sandboxes.

A local sandbox has no shared mounts, so a volume is copied in when a sandbox starts and copied back when
it stops, or when another sandbox that mounts it starts: what one wrote, the next one sees. A tree that has grown over
256 MiB is not copied back: the volume keeps what it held.
"""

from __future__ import annotations

import contextlib
import posixpath
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused, body_of, rfc3339, text_of
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.daytona.sandbox import Sandbox
    from lowtide.emulators.daytona.sandboxes import Sandboxes
    from lowtide.emulators.ground import Ground

_LARGEST_BYTES = 256 << 20
_PACK = 'mkdir -p "$1" && cd "$1" && exec tar -cf - .'
_UNPACK = 'mkdir -p "$1" && cd "$1" && exec tar -xf -'


@dataclass(slots=True, kw_only=True)
class Volume:
    volume_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    name: str
    created_at: float
    used_at: float | None = None
    trees: dict[str, bytes] = field(default_factory=dict)
    """A tar per subpath; "" is the whole."""


class Volumes:
    def __init__(self, ground: Ground, organization_id: str) -> None:
        self.ground = ground
        self.organization_id = organization_id
        self.table: dict[str, Volume] = {}

    def mounts(self, given: Any) -> list[dict[str, Any]]:
        """The volumes of a create call, checked."""
        if not isinstance(given or [], list):
            raise Refused(400, "volumes must be a list")
        mounts = []
        for one in given or []:
            volume = self.get(str(one.get("volumeId") or ""))
            path = str(one.get("mountPath") or "")
            if not path.startswith("/") or posixpath.normpath(path) == "/" or ".." in path.split("/"):
                raise Refused(400, f"Invalid mount path {path}")
            mount = {"volumeId": volume.volume_id, "mountPath": path}
            if one.get("subpath"):
                mount["subpath"] = str(one["subpath"])
            mounts.append(mount)
        return mounts

    def get(self, volume_id: str) -> Volume:
        found = self.table.get(volume_id) or next(
            (v for v in self.table.values() if v.name == volume_id), None
        )
        if found is None:
            raise Refused(404, f"Volume with ID {volume_id} not found")
        return found

    async def fill(self, sandboxes: Sandboxes, sandbox: Sandbox) -> None:
        """Bring what the volumes hold into a sandbox that starts."""
        for mount in sandbox.volumes:
            volume = self.table.get(mount["volumeId"])
            if volume is None:
                continue
            for other in list(sandboxes.table.values()):
                if other is not sandbox and other.backing_id is not None:
                    await self._save_one(sandboxes, other, volume)
            tree = volume.trees.get(mount.get("subpath") or "")
            await sandboxes.ground.backing.run(
                sandbox.backing,
                ("/bin/sh", "-c", 'mkdir -p -m 777 "$1"; chmod 777 "$1"', "sh", mount["mountPath"]),
            )
            # Below the user's own home the sandbox's root, which has no capabilities, cannot make it.
            await sandboxes.machine.run(sandbox, ("/bin/mkdir", "-p", mount["mountPath"]))
            if tree:
                await sandboxes.machine.run(
                    sandbox, ("/bin/sh", "-c", _UNPACK, "sh", mount["mountPath"]), tree
                )
            volume.used_at = self.ground.clock.now()

    async def save(self, sandboxes: Sandboxes, sandbox: Sandbox) -> None:
        """Take what a sandbox that ends has written."""
        for mount in sandbox.volumes:
            volume = self.table.get(mount["volumeId"])
            if volume is not None:
                with contextlib.suppress(LowtideError):
                    await self._save_one(sandboxes, sandbox, volume)

    async def _save_one(self, sandboxes: Sandboxes, sandbox: Sandbox, volume: Volume) -> None:
        for mount in sandbox.volumes:
            if mount["volumeId"] == volume.volume_id:
                code, tree, _ = await sandboxes.machine.run(
                    sandbox,
                    ("/bin/sh", "-c", _PACK, "sh", mount["mountPath"]),
                    most_bytes=_LARGEST_BYTES,
                )
                if code == 0:
                    volume.trees[mount.get("subpath") or ""] = tree

    # ------------------------------------------------------------ the calls

    def add_routes(self, app: web.Application, prefix: str) -> None:
        add = app.router.add_route
        add("GET", f"{prefix}/volumes", self.list_volumes)
        add("POST", f"{prefix}/volumes", self.create_volume)
        add("GET", f"{prefix}/volumes/by-name/{{name}}", self.volume_by_name)
        add("GET", f"{prefix}/volumes/{{id}}", self.get_volume)
        add("DELETE", f"{prefix}/volumes/{{id}}", self.delete_volume)

    async def list_volumes(self, request: web.Request) -> web.Response:
        return web.json_response([self._described(volume) for volume in self.table.values()])

    async def create_volume(self, request: web.Request) -> web.Response:
        name = text_of(await body_of(request), "name")
        if any(volume.name == name for volume in self.table.values()):
            raise Refused(409, f"Volume with name {name} already exists")
        volume = Volume(name=name, created_at=self.ground.clock.now())
        self.table[volume.volume_id] = volume
        return web.json_response(self._described(volume))

    async def get_volume(self, request: web.Request) -> web.Response:
        return web.json_response(self._described(self.get(request.match_info["id"])))

    async def volume_by_name(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        for volume in self.table.values():
            if volume.name == name:
                return web.json_response(self._described(volume))
        raise Refused(404, f"Volume with name {name} not found")

    async def delete_volume(self, request: web.Request) -> web.Response:
        volume = self.get(request.match_info["id"])
        if self.in_use(volume):
            raise Refused(409, "Volume cannot be deleted because it is in use by one or more sandboxes")
        del self.table[volume.volume_id]
        return web.Response(status=200)

    def in_use(self, volume: Volume) -> bool:
        return any(mount["volumeId"] == volume.volume_id for one in self.sandboxes() for mount in one.volumes)

    sandboxes: Any = staticmethod(lambda: ())  # set by the emulator: who mounts what

    def _described(self, volume: Volume) -> dict[str, Any]:
        return {
            "id": volume.volume_id,
            "name": volume.name,
            "organizationId": self.organization_id,
            "state": "ready",
            "createdAt": rfc3339(volume.created_at),
            "updatedAt": rfc3339(volume.created_at),
            "lastUsedAt": rfc3339(volume.used_at) if volume.used_at is not None else None,
            "errorReason": None,
        }
