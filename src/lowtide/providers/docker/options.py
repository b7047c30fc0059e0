"""What only the Docker provider takes: `DockerOptions`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import ValidationError


class PullPolicy(enum.StrEnum):
    """When the image is fetched from its registry."""

    MISSING = "missing"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory or file of the engine's machine, visible in the sandbox. Read-only unless said otherwise."""

    source: str
    target: str
    read_only: bool = True

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
                raise ValidationError(
                    f"a mount's {name} is an absolute path, not {value!r}", argument="mounts"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """All of it off by default: nothing of the host is visible in a sandbox unless it is named here."""

    user: str | None = None
    """Who runs in the sandbox: a name or number, with or without a group. None: the image's own user."""
    read_only_root: bool = False
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """Paths to mount options, e.g. ``{"/tmp": "size=64m"}``. A plain list of paths is taken too."""
    mounts: tuple[Mount, ...] = ()
    runtime: str | None = None
    """An OCI runtime the engine knows, e.g. ``runsc`` or ``kata``."""
    pull: PullPolicy = PullPolicy.MISSING
    add_capabilities: tuple[str, ...] = ()
    drop_capabilities: tuple[str, ...] = ("AUDIT_WRITE", "MKNOD", "NET_RAW")
    no_new_privileges: bool = True
    shm_bytes: int | None = None

    def __post_init__(self) -> None:
        def fix(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        tmpfs: Any = self.tmpfs
        if not isinstance(tmpfs, Mapping):
            fix("tmpfs", dict.fromkeys(_strings("tmpfs", tmpfs), ""))
        for path in self.tmpfs:
            if not isinstance(path, str) or not path.startswith("/"):
                raise ValidationError(f"a tmpfs is an absolute path, not {path!r}", argument="tmpfs")
        fix("mounts", tuple(m if isinstance(m, Mount) else Mount(**m) for m in self.mounts))
        fix("add_capabilities", _strings("add_capabilities", self.add_capabilities))
        fix("drop_capabilities", _strings("drop_capabilities", self.drop_capabilities))
        try:
            fix("pull", PullPolicy(self.pull))
        except ValueError as error:
            words = ", ".join(p.value for p in PullPolicy)
            raise ValidationError(f"pull is one of {words}, not {self.pull!r}", argument="pull") from error


def _strings(argument: str, value: Any) -> tuple[str, ...]:
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(isinstance(v, str) for v in value)
    ):
        raise ValidationError(f"{argument} is a list of strings, not {value!r}", argument=argument)
    return tuple(value)
