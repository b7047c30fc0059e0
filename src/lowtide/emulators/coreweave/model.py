"""What an emulated CoreWeave sandbox is: its state as plain data, and as its messages show it."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cwsandbox._proto import sandbox_pb2 as pb

from lowtide.emulators.coreweave.refusal import Code, Refused
from lowtide.emulators.coreweave.spec import RUNNER, RUNNER_GROUP, RUNTIME_CLASS

if TYPE_CHECKING:
    from lowtide.emulators.agent.client import Agent
    from lowtide.emulators.clock import Timer
    from lowtide.emulators.coreweave.logs import Log
    from lowtide.providers.base import ProcessHandle

OVER = (pb.STATE_COMPLETED, pb.STATE_FAILED, pb.STATE_TERMINATED)


_last = 0


def new_id() -> str:
    """A UUID, greater than all before it: a list in the order of its ids is one by age."""
    global _last
    _last = max(_last + 1, time.time_ns() // 1000)
    digits = f"{_last:015x}"
    return f"{digits[:8]}-{digits[8:12]}-7{digits[12:]}{str(uuid.uuid4())[18:]}"


def stamp(message: Any, seconds: float) -> None:
    """Into a Timestamp."""
    message.FromMicroseconds(round(seconds * 1_000_000))


@dataclass(eq=False, slots=True, kw_only=True)
class Box:
    """One emulated sandbox. `backing_id` is None before it boots and when it is over."""

    sandbox_id: str
    spec: Any
    created_at: float
    display_name: str = ""
    template: tuple[str, int] | None = None
    state: int = pb.STATE_PENDING
    reason: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    urls: dict[int, str] = field(default_factory=dict)
    share_token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    backing_id: str | None = None
    main: ProcessHandle | None = None
    log: Log | None = None
    agent: Agent | None = None
    timer: Timer | None = None
    stuck: bool = False
    """Said to be terminating, and staying."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, with every change of its state."""
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when everything that runs inside ends."""
    ending: asyncio.Task[Any] | None = None
    snapshots: dict[str, str] = field(default_factory=dict)
    """Taken at its end: of which volume each is."""

    @property
    def container(self) -> Any:
        return self.spec.containers[0]

    @property
    def shares(self) -> bool:
        return any(s.endpoint.auth == pb.ENDPOINT_AUTH_SHARE_TOKEN for s in self.spec.services)

    @property
    def backing(self) -> str:
        """Where it runs; `Refused` when it does not."""
        if self.backing_id is None or self.state not in (pb.STATE_RUNNING, pb.STATE_TERMINATING):
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"sandbox {self.sandbox_id} is not running: it is {pb.State.Name(self.state)}",
                "CWSANDBOX_SANDBOX_NOT_RUNNING",
            )
        return self.backing_id

    @property
    def facts(self) -> dict[str, str]:
        """What a fault can be matched with: a tag stands for itself."""
        return {**dict.fromkeys(self.spec.tags, "1"), "sandbox_id": self.sandbox_id}

    def view(self, *, created: bool = False) -> Any:
        """As its clients see it. The share token is told once, in the answer to the create."""
        shown = pb.Sandbox(sandbox_id=self.sandbox_id, display_name=self.display_name)
        shown.spec.CopyFrom(self.spec)
        shown.control = pb.CONTROL_PLATFORM
        if self.template is not None:
            shown.source_template_id, shown.source_template_revision = self.template
        if created and self.shares:
            shown.endpoint_share_token = self.share_token
        status = shown.status
        status.state, status.state_reason = self.state, self.reason
        stamp(status.create_time, self.created_at)
        if self.started_at is not None:
            stamp(status.start_time, self.started_at)
        if self.ended_at is not None:
            stamp(status.end_time, self.ended_at)
        if self.exit_code is not None:
            status.exit_code = self.exit_code
        status.runner_id, status.runner_group_id = RUNNER, RUNNER_GROUP
        status.effective_runtime_class = self.spec.runtime_class or RUNTIME_CLASS
        status.effective_max_lifetime_seconds = self.spec.max_lifetime_seconds
        status.effective_resources.CopyFrom(self.container.resources)
        status.effective_resource_requirements.CopyFrom(self.container.resource_requirements)
        status.effective_ingress.extend(self.spec.network.ingress)
        status.effective_egress.extend(self.spec.network.egress)
        status.attached_volume_ids.extend(v.volume_id for v in self.spec.volumes if v.volume_id)
        one = status.container_statuses.add(name=self.container.name, state=self.state)
        if self.exit_code is not None:
            one.exit_code = self.exit_code
        for service in self.spec.services:
            row = status.services.add(
                port=service.port,
                name=service.name,
                protocol=service.protocol,
                visibility=service.visibility,
                url=self.urls.get(service.port, ""),
            )
            if service.HasField("endpoint"):
                row.endpoint.kind, row.endpoint.auth = service.endpoint.kind, service.endpoint.auth
                row.endpoint.url = row.url
        return shown
