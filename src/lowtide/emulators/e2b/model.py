"""What an emulated E2B sandbox is: its state as plain data, and the ways a request about it can be wrong."""

from __future__ import annotations

import asyncio
import secrets
import string
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.emulators.agent.client import Agent
from lowtide.emulators.clock import Timer

if TYPE_CHECKING:
    from lowtide.emulators.e2b.guest_process import GuestProcess
    from lowtide.emulators.e2b.interpreter import Interpreter

ENVD_VERSION = "0.6.13"
DEFAULT_TIMEOUT_SECONDS = 300
LONGEST_TIMEOUT_SECONDS = 24 * 3600
TEMPLATES = {
    "base": "rki5dems9wqfm4r03t7g",
    "code-interpreter-v1": "nlhz8vlwyupq845jsdg9",
    "code-interpreter-beta": "nlhz8vlwyupq845jsdg9",
}
_ALPHABET = string.ascii_lowercase + string.digits


class NotFound(Exception):
    """No sandbox, snapshot or template with that name."""


class Conflict(Exception):
    """It is in a state in which that cannot be done."""


class BadRequest(Exception):
    """The request is wrong."""


class UnknownUser(Exception):
    """The sandbox has no such user."""


def new_id(prefix: str) -> str:
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(19))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """What happens when the timeout is over."""

    auto_pause: bool = False
    keep_memory: bool = True
    auto_resume: bool = False


@dataclass(slots=True, kw_only=True)
class Snapshot:
    snapshot_id: str
    backing_id: str
    sandbox_id: str
    name: str | None
    template: str
    created_at: float


@dataclass(eq=False, slots=True, kw_only=True)
class Sandbox:
    """One emulated sandbox. `backing_id` is None while it is paused without its memory."""

    sandbox_id: str
    template_id: str
    alias: str | None
    backing_id: str | None
    metadata: dict[str, str]
    environment: dict[str, str]
    started_at: float
    end_at: float
    timeout: float
    lifecycle: Lifecycle
    network: dict[str, Any]
    allow_internet_access: bool | None
    envd_token: str | None
    traffic_token: str | None
    volume_mounts: list[dict[str, Any]] = field(default_factory=list)
    paused: bool = False
    frozen: bool = False
    paused_snapshot: str | None = None
    broken: bool = False
    settled: bool = False
    """Its first process has finished setting things up."""
    boot_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    timer: Timer | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when every open connection into the sandbox ends: at kill and at pause. New after a resume."""
    agents: dict[str, Agent] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    processes: dict[int, GuestProcess] = field(default_factory=dict)
    watchers: dict[str, Any] = field(default_factory=dict)
    interpreter: Interpreter | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def state(self) -> str:
        return "paused" if self.paused else "running"

    @property
    def backing(self) -> str:
        if self.backing_id is None:
            raise NotFound(self.sandbox_id)
        return self.backing_id


def checked_timeout(given: Any) -> float:
    if given is None:
        return DEFAULT_TIMEOUT_SECONDS
    if isinstance(given, bool) or not isinstance(given, int | float) or given < 0:
        raise BadRequest("timeout is a number of seconds, 0 or more")
    if given > LONGEST_TIMEOUT_SECONDS:
        raise BadRequest("Timeout cannot be greater than 24 hours")
    return float(given)


def strings(given: Any, name: str) -> dict[str, str]:
    if given is None:
        return {}
    if not (isinstance(given, dict) and all(isinstance(v, str) for v in given.values())):
        raise BadRequest(f"{name} is an object of strings")
    return dict(given)
