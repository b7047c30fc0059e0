"""Layers by their content: unpacked once, shared by every image that has them, removed with the last."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from lowtide.errors import ValidationError
from lowtide.providers.images.unpack import unpack_layer
from lowtide.trees.remove import remove_tree


class LayerStore:
    """`LOWTIDE_HOME/local/images/.layers/<diff id>`. A directory there is whole: it was renamed into place."""

    def __init__(self, directory: Path, owner: int | None) -> None:
        self.directory, self._owner = directory, owner

    def path(self, diff_id: str) -> Path:
        return self.directory / diff_id.replace(":", "-")

    def has(self, diff_id: str) -> bool:
        return self.path(diff_id).is_dir()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """While layers are added that no image names yet. Several may, from several processes."""
        with self._locked(fcntl.LOCK_SH):
            yield

    def add(self, diff_id: str, stream: IO[bytes]) -> None:
        """Unpack a (gzipped) tar whose content must have this digest. Nothing half-done gets the name."""
        draft = self.directory / f".{os.urandom(6).hex()}"
        try:
            hashed = Hashed(plain(stream))
            unpack_layer(cast("IO[bytes]", hashed), str(draft), self._owner)
            if hashed.rest() != diff_id:
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
            keep = {self.path(diff_id).name for diff_id in used} | {".lock"}
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
            path.mkdir(mode=0o711, parents=True, exist_ok=True)
        fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


class Hashed(io.RawIOBase):
    """A stream that knows the digest of what has been read from it."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._hash = source, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        return data

    def rest(self) -> str:
        """Read to the end; the digest of all of it."""
        while self.read(1 << 20):
            pass
        return f"sha256:{self._hash.hexdigest()}"


def plain(stream: IO[bytes]) -> IO[bytes]:
    """The tar in it, whatever it is packed with; `stream` can be rewound."""
    start = stream.read(4)
    stream.seek(0)
    if start[:2] == b"\x1f\x8b":
        return cast("IO[bytes]", gzip.open(stream, "rb"))
    if start == b"\x28\xb5\x2f\xfd":
        raise ValidationError(
            "a layer is packed with zstd, which is not supported: pull it with docker, `docker save` it and "
            "run `lowtide image import`",
            argument="container_image",
            provider="local",
        )
    return stream
