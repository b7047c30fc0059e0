"""What the emulated service knows: apps, secrets and sandboxes, and the shape of its ids."""

from __future__ import annotations

import asyncio
import secrets
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpclib import Status
from modal_proto import api_pb2 as pb

from lowtide.emulators.modal.refusal import Refused

if TYPE_CHECKING:
    from lowtide.emulators.clock import Timer
    from lowtide.emulators.modal.executions import Execution
    from lowtide.emulators.modal.images import Image

_BASE62 = string.ascii_letters + string.digits

Result = pb.GenericResult


def new_id(kind: str, length: int = 22) -> str:
    """`sb-` and 22 characters is a sandbox of the first form; any other length is one of the second."""
    return f"{kind}-" + "".join(secrets.choice(_BASE62) for _ in range(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    app_id: str
    name: str
    environment: str


@dataclass(eq=False, slots=True, kw_only=True)
class Box:
    """One emulated sandbox. `backing_id` is None before it boots and when it is over."""

    sandbox_id: str
    task_id: str
    app: App
    image: Image
    definition: Any
    environment: dict[str, str]
    tags: dict[str, str]
    created_at: float
    name: str = ""
    backing_id: str | None = None
    main: Execution | None = None
    main_written: int = 0
    executions: dict[str, Execution] = field(default_factory=dict)
    tunnels: list[Any] = field(default_factory=list)
    result: Any = None
    ended_at: float | None = None
    ready_at: float | None = None
    busy: int = 0
    """Commands and connections that keep it from being idle."""
    timer: Timer | None = None
    idle_timer: Timer | None = None
    ending: asyncio.Task[Any] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    booted: asyncio.Event = field(default_factory=asyncio.Event)
    """It runs, or it is over."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def facts(self) -> dict[str, str]:
        """What a fault can be matched with."""
        return {**self.tags, "name": self.name, "sandbox_id": self.sandbox_id}

    @property
    def is_over(self) -> bool:
        return self.result is not None

    async def running(self) -> str:
        """Where it runs, once it has booted; `Refused` when it does not any more."""
        await self.booted.wait()
        if self.backing_id is None or self.ending is not None:
            raise Refused(Status.NOT_FOUND, f"task {self.task_id} has ended")
        return self.backing_id

    def metadata(self) -> Any:
        return pb.SandboxHandleMetadata(result=self.result, app_id=self.app.app_id)

    def info(self) -> Any:
        """As a list shows it."""
        shown = pb.SandboxInfo(
            id=self.sandbox_id,
            created_at=self.created_at,
            app_id=self.app.app_id,
            tags=tags_of(self.tags),
            name=self.name,
            image_id=self.image.image_id,
            timeout_secs=self.definition.timeout_secs,
            tunnels=self.tunnels,
            metadata=self.metadata(),
        )
        shown.task_info.id, shown.task_info.sandbox_id = self.task_id, self.sandbox_id
        shown.task_info.started_at = self.created_at
        if self.result is not None:
            shown.task_info.result.CopyFrom(self.result)
            shown.task_info.finished_at = self.ended_at or self.created_at
        if self.definition.HasField("idle_timeout_secs"):
            shown.idle_timeout_secs = self.definition.idle_timeout_secs
        if self.definition.HasField("readiness_probe"):
            shown.readiness_probe.CopyFrom(self.definition.readiness_probe)
        if self.ready_at is not None:
            shown.ready_at = self.ready_at
        return shown


def tags_of(tags: dict[str, str]) -> list[Any]:
    return [pb.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
