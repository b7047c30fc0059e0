"""A layer's content: unpacked as it is read, counted against the image's bounds, and hashed."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
from typing import IO, cast

from lowtide.errors import ValidationError
from lowtide.providers.images.bounds import Budget

_XZ_MEMORY_BYTES = 256 << 20  # what `xz -9` needs is 65 MiB; a header can ask for four gibibytes
_CHUNK = 1 << 20
XZ = b"\xfd7zXZ\x00"


class Content(io.RawIOBase):
    """The tar in a layer, whatever that is packed with."""

    def __init__(self, layer: IO[bytes], budget: Budget) -> None:
        self._source, self._budget, self._hash = _plain(_Packed(layer, budget)), budget, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(_CHUNK if size < 0 else size)
        self._budget.unpacked(len(data))
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """Of all of it: what was not read yet is read."""
        while self.read(_CHUNK):
            pass
        return f"sha256:{self._hash.hexdigest()}"


class _Packed(io.RawIOBase):
    """The layer as it came, counted."""

    def __init__(self, source: IO[bytes], budget: Budget) -> None:
        self._source, self._budget = source, budget
        self.start = source.read(6)
        self._waiting = self.start

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._waiting:
            data = self._waiting if size < 0 else self._waiting[:size]
            self._waiting = self._waiting[len(data) :]
        else:
            data = self._source.read(size)
        self._budget.packed(len(data))
        return data


class _Xz:
    """xz, with a bound on its memory, which the standard library's file object does not take."""

    def __init__(self, source: _Packed) -> None:
        self._source = source
        self._unpacking = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)

    def read(self, size: int) -> bytes:
        while not self._unpacking.eof:
            packed = self._source.read(_CHUNK) if self._unpacking.needs_input else b""
            if self._unpacking.needs_input and not packed:
                raise EOFError("the layer is cut off")
            data = self._unpacking.decompress(packed, size)
            if data:
                return data
        return b""


def _plain(packed: _Packed) -> IO[bytes]:
    start = packed.start
    if start[:2] == b"\x1f\x8b":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=cast("IO[bytes]", packed), mode="rb"))
    if start[:3] == b"BZh":
        return cast("IO[bytes]", bz2.BZ2File(cast("IO[bytes]", packed)))
    if start == XZ:
        return cast("IO[bytes]", _Xz(packed))
    if start[:4] == b"\x28\xb5\x2f\xfd":
        raise ValidationError(
            "a layer is packed with zstd, which is not supported: pull it with docker, `docker save` it and "
            "run `lowtide image import`",
            argument="container_image",
            provider="local",
        )
    return cast("IO[bytes]", packed)
