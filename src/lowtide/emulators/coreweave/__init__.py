"""The CoreWeave emulator: sandboxes, commands, files, logs, snapshots and runners, over gRPC behind one address."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
from cwsandbox._proto import (
    discovery_pb2_grpc,
    sandbox_pb2,
    sandbox_pb2_grpc,
    sandbox_template_pb2_grpc,
    settings_pb2_grpc,
    volume_pb2_grpc,
)

from lowtide.emulators.coreweave.account import Runners, Settings, Templates
from lowtide.emulators.coreweave.control import Control
from lowtide.emulators.coreweave.model import OVER
from lowtide.emulators.coreweave.relay import Relay
from lowtide.emulators.coreweave.request_check import Checks
from lowtide.emulators.coreweave.sandboxes import Sandboxes
from lowtide.emulators.coreweave.services import Services
from lowtide.emulators.coreweave.snapshots import Snapshots
from lowtide.emulators.coreweave.volumes import Volumes

if TYPE_CHECKING:
    from lowtide.emulators.ground import Address, Ground

_LARGEST_MESSAGE = 100 << 20


class CoreWeaveEmulator:
    name: ClassVar[str] = "coreweave"
    domains: ClassVar[tuple[str, ...]] = ()

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.api_key = "cw_" + secrets.token_hex(20)
        self.relay = Relay()
        self.snapshots = Snapshots(ground)
        self._services = Services(ground)
        self.boxes = Sandboxes(ground, self._services, self.snapshots)
        self.volumes = Volumes(self)
        self.templates = Templates(self)
        self._server: Any = None

    async def start(self, address: Address) -> None:
        self.url = address.url
        await self._services.start()
        server = self._server = grpc.aio.server(
            interceptors=(Checks(self),),
            options=(
                ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
                ("grpc.max_send_message_length", _LARGEST_MESSAGE),
                ("grpc.so_reuseport", 0),
            ),
        )
        sandbox_pb2_grpc.add_SandboxServiceServicer_to_server(Control(self), server)
        discovery_pb2_grpc.add_DiscoveryServiceServicer_to_server(Runners(self), server)
        sandbox_template_pb2_grpc.add_SandboxTemplateServiceServicer_to_server(self.templates, server)
        settings_pb2_grpc.add_SettingsServiceServicer_to_server(Settings(), server)
        volume_pb2_grpc.add_VolumeServiceServicer_to_server(self.volumes, server)
        self.relay.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

    def connection(self) -> asyncio.BaseProtocol:
        return self.relay.connection()

    def environment(self, *, plain: bool) -> dict[str, str]:
        return {"CWSANDBOX_API_KEY": self.api_key, "CWSANDBOX_BASE_URL": self.url}

    def sandboxes(self) -> list[dict[str, Any]]:
        """What still exists: an ended sandbox can be asked for, and holds nothing."""
        return [
            {
                "sandbox_id": box.sandbox_id,
                "state": sandbox_pb2.State.Name(box.state).removeprefix("STATE_").lower(),
                "tags": list(box.spec.tags),
                "created_at": box.created_at,
            }
            for box in self.boxes.table.values()
            if box.state not in OVER
        ]

    async def aclose(self) -> None:
        await self.boxes.aclose()
        self.relay.close()
        if self._server is not None:
            await self._server.stop(0.1)
        await self._services.aclose()
