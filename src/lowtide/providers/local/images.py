"""The image store."""

from __future__ import annotations

from pathlib import Path

from lowtide.providers.local.foundation import Foundation


class ImageStore:
    def __init__(self, directory: Path, owner: int | None) -> None:
        self.directory, self._owner = directory, owner

    def foundation(self, image: str) -> Foundation | None:
        return None
