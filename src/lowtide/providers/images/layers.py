"""Layers by their content: unpacked once, shared by every image that has them, removed with the last."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lowtide.errors import ValidationError
from lowtide.providers.images import documents
from lowtide.providers.images.bounds import Budget
from lowtide.providers.images.unpack import unpack_layer
from lowtide.trees.passable import close_to_others, make_passable
from lowtide.trees.remove import remove_tree


class LayerStore:
    """`LOWTIDE_HOME/local/images/.layers/<diff id>`. A directory there is whole: it was renamed into place."""

    def __init__(self, directory: Path, owner: int | None) -> None:
        self.directory, self._owner = directory, owner

    def path(self, diff_id: str) -> Path:
        return self.directory / documents.digest(diff_id).replace(":", "-")

    def has(self, diff_id: str) -> bool:
        return self.path(diff_id).is_dir()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """While layers are added that no image names yet. Several may, from several processes."""
        with self._locked(fcntl.LOCK_SH):
            yield

    def add(self, diff_id: str, layer: IO[bytes], budget: Budget) -> None:
        """Unpack a (packed) tar whose content must have this digest. Nothing half-done gets the name."""
        draft = self.directory / f".{os.urandom(6).hex()}"
        try:
            if unpack_layer(layer, str(draft), self._owner, budget) != diff_id:
                raise ValidationError(
                    f"a layer's content is not {diff_id}", argument="container_image", provider="local"
                )
            with contextlib.suppress(FileExistsError, OSError):  # another pull was first: that one is as good
                os.rename(draft, self.path(diff_id))
            if not self.has(diff_id):
                raise OSError(f"the layer {diff_id} could not be put in place")
        finally:
            remove_tree(draft)

    def clean(self, used: set[str]) -> None:
        """Remove what no image uses and what a killed pull has left; not now when somebody is adding."""
        with contextlib.suppress(BlockingIOError), self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            keep = {str(diff_id).replace(":", "-") for diff_id in used} | {".lock"}
            for name in set(os.listdir(self.directory)) - keep:
                remove_tree(self.directory / name)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[IO[bytes]]:
        """A file for a download. It has no name, so a killed pull leaves nothing of it."""
        path = self.directory / f".{os.urandom(6).hex()}"
        with open(path, "x+b") as file:
            os.unlink(path)
            yield file

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        for path in (self.directory.parent.parent, self.directory.parent, self.directory):
            make_passable(path)
        close_to_others(self.directory.parent, self._owner)
        fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)
