"""What only Runloop understands about one sandbox: `RunloopOptions`."""

from __future__ import annotations

from collections.abc import Mapping
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
        commands, seconds = self.launch_commands, self.keep_alive_seconds
        texts = not isinstance(commands, str) and all(isinstance(one, str) and one for one in commands)
        _check("launch_commands", texts, "a list of commands")
        object.__setattr__(self, "launch_commands", tuple(commands))
        _check("size", self.size in (None, *SIZES), f"one of {', '.join(SIZES)}")
        whole = seconds is None or (type(seconds) is int and 1 <= seconds <= LONGEST_SECONDS)
        _check("keep_alive_seconds", whole, f"a whole number up to {LONGEST_SECONDS}")
        _check("architecture", self.architecture in (None, "x86_64", "arm64"), "x86_64 or arm64")
        _check("blueprint_id", not (self.blueprint and self.blueprint_id), "given in place of blueprint")
        _check("user", self.user is None or user_parameters(self.user) is not None, "root, or NAME:NUMBER")


def user_parameters(user: str) -> dict[str, str | int] | None:
    """As Runloop takes it; None for what it is not."""
    name, _, number = user.partition(":")
    if user == "root":
        number = "0"
    if not name or not (number.isascii() and number.isdecimal()):
        return None
    return {"username": name, "uid": int(number)}


def _check(argument: str, fine: bool, what: str) -> None:
    if not fine:
        raise ValidationError(f"{argument} is {what}", argument=argument, provider="runloop")
