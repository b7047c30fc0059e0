"""Reading a tar that somebody hostile wrote: no header takes more memory, time or stack than a name needs.

The standard library reads extended headers whole, whatever size they claim, searches them with expressions
that take quadratic time, and goes one call deeper for each that follows another.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, Any

_MAX_HEADER_BYTES = 1 << 20
_MAX_NESTED = 8  # a long name, a long link and a few extended headers can stand before one entry
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_KEYS = frozenset({"path", "linkpath", "size", "uid", "gid", "mtime"})


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Its entries, one at a time. None is remembered: a hostile archive has no end."""
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]
        yield member


def open_stream(source: IO[bytes], block: int) -> tarfile.TarFile:
    """A plain tar that is read once, from its beginning to its end."""
    return tarfile.open(mode="r|", fileobj=source, bufsize=block, tarinfo=CarefulInfo)


class CarefulInfo(tarfile.TarInfo):
    """One entry, read with bounds. Raises tarfile.ReadError."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> CarefulInfo:
        info = super().frombuf(buf, encoding, errors)
        if info.type in (*_EXTENDED, *_LONG) and info.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError("a header claims to be larger than any name can be")
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse()
        if info.size < 0:
            raise tarfile.ReadError("an entry claims a size below nothing")
        return info

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> CarefulInfo:
        depth = getattr(archive, "nested_headers", 0)
        if depth > _MAX_NESTED:
            raise tarfile.ReadError("too many headers stand before one entry")
        archive.nested_headers = depth + 1  # type: ignore[attr-defined]
        try:
            return super().fromtarfile(archive)
        finally:
            archive.nested_headers = depth  # type: ignore[attr-defined]

    def _proc_pax(self, archive: Any) -> tarfile.TarInfo:
        """In place of the library's own. Of its records only those are kept that are used here."""
        content = archive.fileobj.read(self._block(self.size))[: self.size]  # type: ignore[attr-defined]
        records = dict(_records(content))
        try:
            if self.type == tarfile.XGLTYPE:
                archive.pax_headers.update(records)
                return self.fromtarfile(archive)
            entry = self.fromtarfile(archive)
        except tarfile.HeaderError as error:  # would count as the archive's end
            raise tarfile.ReadError(str(error)) from None
        entry._apply_pax_info({**archive.pax_headers, **records}, archive.encoding, archive.errors)  # type: ignore[attr-defined]
        if entry.size < 0:
            raise tarfile.ReadError("an entry claims a size below nothing")
        entry.offset = self.offset
        if "size" in records:
            archive.offset = entry.offset_data
            if entry.isreg() or entry.type not in tarfile.SUPPORTED_TYPES:
                archive.offset += entry._block(entry.size)  # type: ignore[attr-defined]
        return entry


def _records(content: bytes) -> Iterator[tuple[str, str]]:
    """``LENGTH KEY=VALUE`` lines, LENGTH counting all of its own line."""
    at = 0
    while at < len(content) and content[at]:
        space = content.find(b" ", at, at + 8)
        length = int(content[at:space]) if space > at and content[at:space].isdigit() else 0
        end = at + length
        key, equals, value = content[space + 1 : end - 1].partition(b"=")
        if end <= space + 1 or end > len(content) or not equals or content[end - 1 : end] != b"\n":
            raise tarfile.ReadError("an extended header is broken")
        if key.startswith(b"GNU.sparse."):
            raise _sparse()
        name = key.decode("utf-8", "replace")
        if name in _KEYS:
            yield name, value.decode("utf-8", "surrogateescape")
        at = end


def _sparse() -> tarfile.ReadError:
    return tarfile.ReadError("it holds sparse files, which are not taken: pack it without --sparse")
