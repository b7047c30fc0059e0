"""The Modal emulator: apps, images, sandboxes and their command router, over gRPC behind one address."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

from grpclib import Status

from lowtide.emulators.modal.account import Account, Secrets
from lowtide.emulators.modal.calls import Call, Server
from lowtide.emulators.modal.control import Control
from lowtide.emulators.modal.images import Images
from lowtide.emulators.modal.model import Box
from lowtide.emulators.modal.refusal import Refused
from lowtide.emulators.modal.router import Router
from lowtide.emulators.modal.sandboxes import Sandboxes
from lowtide.emulators.modal.tokens import Tokens
from lowtide.emulators.modal.tunnels import Tunnels

if TYPE_CHECKING:
    from lowtide.emulators.ground import Address, Ground


class ModalEmulator:
    name: ClassVar[str] = "modal"
    domains: ClassVar[tuple[str, ...]] = ()

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.token_id = "ak-" + secrets.token_hex(11)
        self.token_secret = "as-" + secrets.token_hex(16)
        self.tokens = Tokens()
        self.account, self.secrets = Account(), Secrets(ground.clock)
        self.images = Images(ground)
        self.tunnels = Tunnels(ground)
        self.boxes = Sandboxes(ground, self.tunnels)
        self.tunnels.hold, self.tunnels.release = self.boxes.hold, self.boxes.release
        self._server = Server(self, Control(self), Router(self))

    async def start(self, address: Address) -> None:
        self._address = address

    def connection(self) -> asyncio.BaseProtocol:
        return self._server.connection()

    def environment(self, *, plain: bool) -> dict[str, str]:
        found = {
            "MODAL_SERVER_URL": self._address.url,
            "MODAL_TOKEN_ID": self.token_id,
            "MODAL_TOKEN_SECRET": self.token_secret,
        }
        if not plain:  # for encrypted tunnels
            found |= self.ground.trust_environment()
        return found

    def router_url(self, call: Call) -> str:
        """The command router is this server, too. The JavaScript SDK wants https, and dials a local one plainly."""
        url = self._address.url
        return url if call.from_python else url.replace("http://", "https://", 1)

    def check_router_token(self, call: Call, task_id: str) -> None:
        token = call.header("authorization").removeprefix("Bearer ")
        if not self.tokens.holds(token, task_id):
            raise Refused(Status.UNAUTHENTICATED, "the token is missing, wrong or over")

    async def until_ready(self, box: Box, seconds: float) -> float:
        """When its readiness probe first succeeded."""
        if not box.definition.HasField("readiness_probe"):
            raise Refused(Status.FAILED_PRECONDITION, "the sandbox has no readiness probe")
        waits = [asyncio.ensure_future(box.ready.wait()), asyncio.ensure_future(box.over.wait())]
        try:
            await asyncio.wait(waits, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if box.ready_at is None:
            if box.is_over:
                raise Refused(Status.FAILED_PRECONDITION, f"sandbox {box.sandbox_id} has ended")
            raise Refused(Status.DEADLINE_EXCEEDED, "the sandbox is not ready yet")
        return box.ready_at

    def sandboxes(self) -> list[dict[str, Any]]:
        """What still exists: an ended sandbox can be asked for, and holds nothing."""
        return [
            {
                "sandbox_id": box.sandbox_id,
                "name": box.name,
                "app": box.app.name,
                "state": "running" if box.backing_id is not None else "starting",
                "tags": dict(box.tags),
                "created_at": box.created_at,
                "timeout_seconds": box.definition.timeout_secs,
                "ports": [one.container_port for one in box.tunnels],
            }
            for box in self.boxes.table.values()
            if not box.is_over
        ]

    async def aclose(self) -> None:
        await self.images.aclose()
        await self.boxes.aclose()
        await self._server.aclose()
