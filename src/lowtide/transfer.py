"""What an upload or a download moved, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.errors import SandboxFileError
from lowtide.providers.base import Provider

Moved = Callable[[int], None]
"""Hears of each piece that has been moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What an upload or a download moved."""

    files: int
    bytes: int
    skipped: tuple[str, ...] = ()
    """Left out: devices, pipes, sockets, links that would lead out of the directory, and what says no size and cannot be
    read, or not to its end (`/proc`)."""
    changed: tuple[str, ...] = ()
    """Written to while they were read. What arrived is what was read: at most the size of the start, never padded."""
    stripped: tuple[str, ...] = ()
    """Arrived here without their set-user-ID and set-group-ID bits."""


def verify(count: int, size: int, path: str, provider: Provider, sandbox_id: str) -> None:
    if count != size:
        raise SandboxFileError(
            f"{path}: {count} bytes arrived of {size}",
            path=path,
            provider=provider.name,
            sandbox_id=sandbox_id,
            retryable=True,
        )
