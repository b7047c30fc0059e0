"""What an emulated Runloop devbox is: its state as plain data, as its views show it, and how a call can be wrong."""

from __future__ import annotations

import asyncio
import enum
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.emulators.agent.client import Agent
    from lowtide.emulators.clock import Timer
    from lowtide.emulators.runloop.executions import Execution

DEFAULT_KEEP_ALIVE_SECONDS = 3600
LONGEST_KEEP_ALIVE_SECONDS = 172_800


class Refused(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Status(enum.StrEnum):
    PROVISIONING = "provisioning"
    INITIALIZING = "initializing"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    FAILURE = "failure"
    SHUTDOWN = "shutdown"


OVER = (Status.FAILURE, Status.SHUTDOWN)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(eq=False, slots=True, kw_only=True)
class Tunnel:
    key: str
    auth_mode: str
    token: str | None
    created_at: float
    http_keep_alive: bool = False
    wake_on_http: bool = False

    def view(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "auth_mode": self.auth_mode,
            "create_time_ms": milliseconds(self.created_at),
            "http_keep_alive": self.http_keep_alive,
            "tunnel_key": self.key,
            "wake_on_http": self.wake_on_http,
        }
        if self.token is not None:
            shown["auth_token"] = self.token
        return shown


@dataclass(eq=False, slots=True, kw_only=True)
class Snapshot:
    snapshot_id: str
    source_id: str
    created_at: float
    metadata: dict[str, str]
    name: str | None = None
    commit_message: str | None = None
    status: str = "in_progress"
    error: str | None = None
    backing_id: str | None = None

    def view(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "id": self.snapshot_id,
            "create_time_ms": milliseconds(self.created_at),
            "metadata": self.metadata,
            "source_devbox_id": self.source_id,
        }
        if self.name is not None:
            shown["name"] = self.name
        if self.commit_message is not None:
            shown["commit_message"] = self.commit_message
        return shown


@dataclass(eq=False, slots=True, kw_only=True)
class Devbox:
    """One emulated devbox. `backing_id` is None before it boots, while it is suspended and when it is over."""

    devbox_id: str
    name: str
    metadata: dict[str, str]
    environment: dict[str, str]
    launch: dict[str, Any]
    created_at: float
    blueprint_id: str | None = None
    snapshot_id: str | None = None
    base: str | None = None
    """The backing snapshot it boots from."""
    file_mounts: dict[str, str] = field(default_factory=dict)
    object_mounts: dict[str, str] = field(default_factory=dict)
    entrypoint: str | None = None
    status: Status = Status.PROVISIONING
    transitions: list[dict[str, Any]] = field(default_factory=list)
    ended_at: float | None = None
    shutdown_reason: str | None = None
    failure_reason: str | None = None
    tunnel: Tunnel | None = None
    backing_id: str | None = None
    disk: str | None = None
    """The backing snapshot a suspended one goes on from."""
    snapshotting: int = 0
    timer: Timer | None = None
    active_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, with every change of its status."""
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when everything that runs inside ends: at suspend and at the end. New after a resume."""
    agent: Agent | None = None
    executions: dict[str, Execution] = field(default_factory=dict)
    by_command: dict[str, Execution] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def backing(self) -> str:
        if self.backing_id is None:
            raise Refused(400, f"Devbox {self.devbox_id} is not running: its status is {self.status}")
        return self.backing_id

    @property
    def idle(self) -> dict[str, Any] | None:
        """What to do when nothing happens, and after how long; it takes the place of the keep-alive."""
        lifecycle = self.launch.get("lifecycle") or {}
        return lifecycle.get("after_idle") or self.launch.get("after_idle")

    @property
    def user(self) -> str:
        return str((self.launch.get("user_parameters") or {}).get("username") or "user")

    @property
    def facts(self) -> dict[str, str]:
        return {**self.metadata, "sandbox_id": self.devbox_id, "name": self.name}

    def view(self) -> dict[str, Any]:
        shown = {
            "id": self.devbox_id,
            "name": self.name,
            "status": str(self.status),
            "capabilities": [],
            "create_time_ms": milliseconds(self.created_at),
            "end_time_ms": None if self.ended_at is None else milliseconds(self.ended_at),
            "launch_parameters": self.launch,
            "metadata": self.metadata,
            "state_transitions": self.transitions,
            "blueprint_id": self.blueprint_id,
            "snapshot_id": self.snapshot_id,
            "shutdown_reason": self.shutdown_reason,
            "failure_reason": self.failure_reason,
            "initiator_type": "api",
            "tunnel": self.tunnel.view() if self.tunnel else None,
        }
        return {key: value for key, value in shown.items() if value is not None}
