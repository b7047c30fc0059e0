"""What only Runloop understands about one sandbox: `RunloopOptions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.errors import ValidationError

LONGEST_SECONDS = 172_800
SIZES = ("X_SMALL", "SMALL", "MEDIUM", "LARGE", "X_LARGE", "XX_LARGE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunloopOptions:
    """Goes in `SandboxSpec.options`. Everything has Runloop's own default."""

    blueprint: str | None = None
    """A blueprint's name, a prebuilt one's too: its newest build. None: the provider's, else Runloop's default image."""
    blueprint_id: str | None = None
    """One build of a blueprint; not together with `blueprint`."""
    size: str | None = None
    """Processors, memory and disk: X_SMALL, SMALL, MEDIUM, LARGE, X_LARGE or XX_LARGE."""
    launch_commands: tuple[str, ...] = ()
    """Run in a shell before the sandbox counts as ready; one that fails, fails it."""
    user: str | None = None
    """Who everything runs as: ``root``, or a name with its number, ``agent:1001``. None: Runloop's ``user``."""
    keep_alive_seconds: int | None = None
    """How long it lives without a renewal, where that is more than the lease: 172800 at most. Runloop never changes it."""
    architecture: str | None = None
    """``x86_64`` or ``arm64``."""
    network_policy_id: str | None = None
    """One of the account's network policies."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Names of the account's secrets, keyed by the variable that gets their value."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """More metadata beside lowtide's own, whose names begin with ``lowtide-``."""

    def __post_init__(self) -> None:
        commands = self.launch_commands
        if isinstance(commands, str) or not isinstance(commands, Sequence):
            raise _wrong("launch_commands", "a list of strings", commands)
        if not all(isinstance(command, str) and command for command in commands):
            raise _wrong("launch_commands", "a list of strings", commands)
        object.__setattr__(self, "launch_commands", tuple(commands))
        if self.size is not None and self.size not in SIZES:
            raise _wrong("size", f"one of {', '.join(SIZES)}", self.size)
        seconds = self.keep_alive_seconds
        if seconds is not None and not (type(seconds) is int and 1 <= seconds <= LONGEST_SECONDS):
            raise _wrong("keep_alive_seconds", f"a whole number from 1 to {LONGEST_SECONDS}", seconds)
        if self.architecture not in (None, "x86_64", "arm64"):
            raise _wrong("architecture", "x86_64 or arm64", self.architecture)
        if self.blueprint is not None and self.blueprint_id is not None:
            raise _wrong("blueprint_id", "given without a blueprint", self.blueprint_id)
        if self.user is not None and user_parameters(self.user) is None:
            raise _wrong("user", "root, or a name with its number (agent:1001)", self.user)


def user_parameters(user: str) -> dict[str, str | int] | None:
    """As Runloop takes it; None for what it is not."""
    name, _, number = user.partition(":")
    if user == "root":
        number = "0"
    if not name or not (number.isascii() and number.isdecimal()):
        return None
    return {"username": name, "uid": int(number)}


def _wrong(argument: str, what: str, value: object) -> ValidationError:
    return ValidationError(f"{argument} is {what}, not {value!r}", argument=argument, provider="runloop")
