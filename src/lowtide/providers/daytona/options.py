"""What only Daytona understands about one sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DaytonaOptions:
    """Goes in `SandboxSpec.options`. Everything has Daytona's own default."""

    snapshot: str | None = None
    """Name of the snapshot to start from; not together with an image. None: the provider's, else Daytona's."""
    image: str | None = None
    """An image to build the sandbox from, the same as ``container_image``."""
    target: str | None = None
    """The region. None: ``DAYTONA_TARGET``, else the account's."""
    user: str | None = None
    """Who commands run as. None: the snapshot's user."""
    auto_stop_minutes: int | None = None
    """Idle minutes after which Daytona stops it. None: as long as the lease, which renewal keeps away."""
    auto_archive_minutes: int | None = None
    auto_delete_minutes: int = 0
    """Minutes from stopped to deleted. 0: at once, so that a forgotten one goes; below 0: never."""
    public: bool = False
    """Whether its ports are reachable without a token."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """More labels beside lowtide's own, whose names begin with ``lowtide-``; a session id of yours, say."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Volumes by id, keyed by where they are mounted."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Secrets of the organisation by name, keyed by the variable that holds their placeholder."""
    spot: bool = False
