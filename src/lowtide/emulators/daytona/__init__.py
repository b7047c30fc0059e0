"""The Daytona emulator: control plane, toolbox, events and preview links behind one address.

``/api`` is the control plane with its Socket.IO events, ``/toolbox/SANDBOX/...`` what the daemon inside
each sandbox answers on the service.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web

from lowtide.emulators.daytona.answers import control_error, daemon_error
from lowtide.emulators.daytona.control import Control
from lowtide.emulators.daytona.drafting import REGION
from lowtide.emulators.daytona.events import Events
from lowtide.emulators.daytona.organization import Organization
from lowtide.emulators.daytona.previews import Previews
from lowtide.emulators.daytona.sandbox import Sandbox, SandboxState, described
from lowtide.emulators.daytona.sandboxes import Sandboxes
from lowtide.emulators.daytona.snapshots import Snapshots
from lowtide.emulators.daytona.toolbox import Toolbox
from lowtide.emulators.daytona.volumes import Volumes
from lowtide.emulators.web import HttpServer

if TYPE_CHECKING:
    from lowtide.emulators.ground import Address, Ground

_API, _TOOLBOX = "/api", "/toolbox"


class DaytonaEmulator:
    name: ClassVar[str] = "daytona"
    domains: ClassVar[tuple[str, ...]] = ()
    """The SDK takes any URL, so nothing needs the proxy."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.api_key = "dtn_" + secrets.token_hex(32)
        self.organization_id = str(uuid.uuid4())
        self.snapshots = Snapshots(ground, self.organization_id)
        self.volumes = Volumes(ground, self.organization_id)
        self.sandboxes_table = Sandboxes(
            ground, self.organization_id, self.snapshots, self.volumes, self._changed
        )
        self.volumes.sandboxes = self.sandboxes_table.table.values
        self.previews = Previews(ground)
        control, toolbox = Control(self), Toolbox(self)
        app = web.Application(
            middlewares=[control.middleware(_API), toolbox.middleware(_TOOLBOX)], client_max_size=64 << 20
        )
        control.add_routes(app, _API)
        self.snapshots.add_routes(app, _API)
        self.volumes.add_routes(app, _API)
        Organization(ground, self.organization_id, self.sandboxes_table).add_routes(app, _API)
        toolbox.add_routes(app, _TOOLBOX)
        self._events = Events(app, f"{_API.strip('/')}/socket.io", self.api_key)

        def refusal(request: web.Request, status: int, message: str) -> web.Response:
            shape = daemon_error if request.path.startswith(_TOOLBOX + "/") else control_error
            return shape(request, status, message)

        self._server = HttpServer(
            app,
            refusal=refusal,
            answered=partial(ground.answered, self.name),
            allow_remote=ground.settings.allow_remote,
        )

    async def start(self, address: Address) -> None:
        self.api_url = address.url + _API
        self.toolbox_url = address.url + _TOOLBOX
        await self._server.start()
        await self.previews.start()

    def connection(self) -> asyncio.BaseProtocol:
        return self._server.connection()

    def environment(self, *, plain: bool) -> dict[str, str]:
        found = {"DAYTONA_API_KEY": self.api_key, "DAYTONA_API_URL": self.api_url, "DAYTONA_TARGET": REGION}
        # The SDK sends the local files of an image over TLS, to no other address than one with TLS.
        return (
            found
            if plain
            else {**found, **self.ground.trust_environment(), **self.ground.python_environment()}
        )

    def sandboxes(self) -> list[dict[str, Any]]:
        return [
            {
                "sandbox_id": sandbox.sandbox_id,
                "name": sandbox.name,
                "state": str(sandbox.state),
                "labels": sandbox.labels,
                "created_at": sandbox.created_at,
                "last_activity_at": sandbox.last_activity_at,
                "destroy_at": sandbox.destroy_at,
            }
            for sandbox in self.sandboxes_table.table.values()
        ]

    async def created(self, sandbox: Sandbox) -> None:
        await self._events.tell("sandbox.created", described(sandbox, self.toolbox_url))

    async def _changed(self, sandbox: Sandbox, before: SandboxState, after: SandboxState) -> None:
        if after is SandboxState.DESTROYED:
            self.previews.forget(sandbox)
        told = {"sandbox": described(sandbox, self.toolbox_url), "oldState": before, "newState": after}
        await self._events.tell("sandbox.state.updated", told)

    async def aclose(self) -> None:
        await self.sandboxes_table.aclose()
        await self.snapshots.aclose()
        await self._events.aclose()
        await self.previews.aclose()
        await self._server.aclose()
