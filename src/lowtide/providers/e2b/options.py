"""What only E2B understands about one sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class E2BOptions:
    """Goes in `SandboxSpec.options`. Everything has E2B's own default."""

    template: str | None = None
    """Name or id of the template; processors, memory and disk belong to it. None: the provider's, else ``base``."""
    user: str | None = None
    """Who commands and file operations run as. None: the template's user (``user``, who may use sudo)."""
    on_timeout: Literal["kill", "pause"] = "kill"
    """What the lifetime's end does. A paused sandbox holds its disk until somebody ends it: the guardian
    or a sweep do, but no clock of E2B's."""
    auto_resume: bool = False
    """Wake a paused one on the first use. Only with ``on_timeout="pause"``."""
    network: Mapping[str, Any] | None = field(default=None, repr=False)  # its rules may add keys to requests
    """E2B's own network settings (``allow_out``, ``deny_out``, ``rules``…); not together with `network`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """More metadata beside lowtide's own, whose names begin with ``lowtide-``."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Volumes by name, keyed by where they are mounted."""
    mcp: Mapping[str, Any] | None = field(default=None, repr=False)  # servers are given their keys here
    """MCP servers to start in the sandbox."""
