"""What a sandbox stands on: this machine's /usr, an image, or a snapshot of either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.providers.local.python_trees import ReadOnlyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseLayers:
    """Layers from the bottom up. `usr` is None where one overlay at / holds everything."""

    root: tuple[str, ...]
    usr: tuple[str, ...] | None = None
    read_only: tuple[ReadOnlyTree, ...] = ()
    """Trees of this machine that are seen inside, at the same path."""
    foreign: tuple[str, ...] = ()
    """Host trees among the layers whose owner is not the sandbox's range of ids."""
    environment: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "/root"
    record: Mapping[str, Any] = field(default_factory=dict)
    """For spec.json: what it stands on, so that images and snapshots in use are known."""
