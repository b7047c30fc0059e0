"""Snapshots: the upper layers of a sandbox, kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.providers.local.foundation import Foundation
from lowtide.providers.local.place import Place


class SnapshotStore:
    def __init__(self, directory: Path, owner: int | None) -> None:
        self.directory, self._owner = directory, owner

    def foundation(self, snapshot_id: str, base: Callable[[str | None], Foundation]) -> Foundation:
        raise NotImplementedError

    def take(self, place: Place, spec: dict[str, Any], name: str, *, move: bool = False) -> str:
        raise NotImplementedError

    def delete(self, snapshot_id: str, sandboxes: Path) -> bool:
        raise NotImplementedError

    def names(self) -> list[str]:
        raise NotImplementedError
