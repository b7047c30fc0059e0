"""One emulated sandbox: what the service knows of it, and the two shapes in which it tells."""

from __future__ import annotations

import asyncio
import enum
import secrets
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.emulators.agent.client import Agent
from lowtide.emulators.clock import Timer
from lowtide.emulators.daytona.answers import Refused, rfc3339

if TYPE_CHECKING:
    from lowtide.emulators.build import Built


class SandboxState(enum.StrEnum):
    """The service's own words. Those ending in -ing are on the way: nothing else can be asked of it then."""

    CREATING = "creating"
    RESTORING = "restoring"
    STARTING = "starting"
    STARTED = "started"
    STOPPING = "stopping"
    STOPPED = "stopped"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    ARCHIVING = "archiving"
    ARCHIVED = "archived"
    RESIZING = "resizing"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    PENDING_BUILD = "pending_build"
    BUILDING_SNAPSHOT = "building_snapshot"
    BUILD_FAILED = "build_failed"
    ERROR = "error"
    DESTROYING = "destroying"
    DESTROYED = "destroyed"


SETTLED = frozenset(
    {
        SandboxState.STARTED,
        SandboxState.STOPPED,
        SandboxState.PAUSED,
        SandboxState.ARCHIVED,
        SandboxState.ERROR,
        SandboxState.BUILD_FAILED,
    }
)


@dataclass(slots=True, kw_only=True)
class Intervals:
    """Minutes after which the service does something by itself."""

    stop: int = 15
    """Without activity. 0: never."""
    pause: int = 0
    """Without activity, in place of stopping. 0: never."""
    archive: int = 7 * 24 * 60
    """After it stopped. 0: the longest there is."""
    delete: int = -1
    """After it stopped. 0: at once; below 0: never."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sandbox:
    sandbox_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    organization_id: str
    name: str
    user: str
    target: str
    snapshot: str | None
    environment: dict[str, str]
    labels: dict[str, str]
    public: bool
    intervals: Intervals
    created_at: float
    cpu: int = 1
    memory: int = 1
    disk: int = 3
    gpu: int = 0
    network: dict[str, Any] = field(default_factory=dict)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    secrets: list[dict[str, str]] = field(default_factory=list)
    build: dict[str, Any] | None = None
    build_log: list[str] = field(default_factory=list)
    built: Built | None = None
    """Held until it is deleted."""
    workdir: str = ""
    """Of its image; empty: the user's home."""
    parent_id: str | None = None
    linked_id: str | None = None

    state: SandboxState = SandboxState.CREATING
    desired: str = "started"
    error_reason: str | None = None
    recoverable: bool = False
    updated_at: float = 0.0
    last_activity_at: float = 0.0
    stopped_at: float = 0.0
    """Auto-archive and auto-delete count from it."""
    destroy_at: float | None = None
    expiry_minutes: int | None = None

    base: str | None = None
    """The backing snapshot it was made from; belongs to the snapshot, not to this sandbox."""
    backing_id: str | None = None
    layers: list[str] = field(default_factory=list)
    """The backing snapshots of its own stops, the newest last."""
    agent: Agent | None = None
    agent_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: Timer | None = None
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when every open connection into the sandbox ends: at stop and destroy. New after a start."""
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """What has to let go of the running machine before it ends: sessions, terminals, interpreters."""
    rooms: dict[str, Any] = field(default_factory=dict)
    """What the toolbox keeps for the running machine, by kind."""
    preview_token: str = field(default_factory=lambda: secrets.token_hex(16))
    signing_key: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def backing(self) -> str:
        if self.backing_id is None:
            raise Refused(400, "Sandbox is not started")
        return self.backing_id

    @property
    def facts(self) -> dict[str, str]:
        """What a fault can match."""
        return {**self.labels, "sandbox_id": self.sandbox_id, "name": self.name}


def listed(sandbox: Sandbox, toolbox_url: str) -> dict[str, Any]:
    """As an item of a list."""
    described: dict[str, Any] = {
        "id": sandbox.sandbox_id,
        "organizationId": sandbox.organization_id,
        "name": sandbox.name,
        "target": sandbox.target,
        "sandboxClass": "container",
        "state": str(sandbox.state),
        "desiredState": sandbox.desired,
        "snapshot": sandbox.snapshot,
        "user": sandbox.user,
        "errorReason": sandbox.error_reason,
        "recoverable": sandbox.recoverable,
        "public": sandbox.public,
        "networkBlockAll": bool(sandbox.network.get("networkBlockAll", False)),
        "networkAllowList": sandbox.network.get("networkAllowList"),
        "domainAllowList": sandbox.network.get("domainAllowList"),
        "cpu": sandbox.cpu,
        "gpu": sandbox.gpu,
        "spot": False,
        "memory": sandbox.memory,
        "disk": sandbox.disk,
        "labels": sandbox.labels,
        "backupState": "None",
        "autoStopInterval": sandbox.intervals.stop,
        "autoPauseInterval": sandbox.intervals.pause,
        "autoArchiveInterval": sandbox.intervals.archive,
        "autoDeleteInterval": sandbox.intervals.delete,
        "autoDestroyAt": rfc3339(sandbox.destroy_at) if sandbox.destroy_at is not None else None,
        "createdAt": rfc3339(sandbox.created_at),
        "updatedAt": rfc3339(sandbox.updated_at),
        "lastActivityAt": rfc3339(sandbox.last_activity_at),
        "daemonVersion": "0.226.1",
        "runnerId": "lowtide",
        "toolboxProxyUrl": toolbox_url,
    }
    return {key: value for key, value in described.items() if value is not None}


def described(sandbox: Sandbox, toolbox_url: str) -> dict[str, Any]:
    """The whole of it."""
    whole = {
        **listed(sandbox, toolbox_url),
        "env": sandbox.environment,
        "kvm": False,
        "volumes": sandbox.volumes,
        "buildInfo": sandbox.build,
        "linkedSandboxId": sandbox.linked_id,
        "ttlMinutes": sandbox.expiry_minutes,
    }
    return {key: value for key, value in whole.items() if value is not None}
