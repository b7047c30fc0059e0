"""Reading an image from a file: `docker save`, an OCI layout in a tar, or a tar of a root filesystem."""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from lowtide.providers.images import documents
from lowtide.providers.images.bounds import MAX_DOCUMENT_BYTES, MAX_INDEXES, Budget, check_layers
from lowtide.trees.tar import members

_MAX_FILES = 10_000  # that are looked at for a manifest, a configuration or a layer
_MAX_DEPTH = 3  # blobs/sha256/…


def read_archive(archive: tarfile.TarFile, budget: Budget) -> tuple[Iterator[IO[bytes]], Mapping[str, Any]]:
    """Its layers from the bottom up, as they are packed, and its configuration."""
    files = _Files(archive, budget)
    if "manifest.json" in files:
        listed = documents.mappings(files.document("manifest.json"), "manifests")
        if len(listed) != 1:
            raise documents.bad(f"the file holds {len(listed)} images; save one alone")
        return _docker(files, listed[0])
    if "index.json" in files and "oci-layout" in files:
        return _oci(files)
    if archive.name is None:
        raise documents.bad("there is no manifest in it")
    return iter([open(os.fsdecode(archive.name), "rb")]), {}


def _docker(files: _Files, manifest: Mapping[str, Any]) -> tuple[Iterator[IO[bytes]], Mapping[str, Any]]:
    layers = documents.words(manifest.get("Layers"), "layers")
    config = documents.mapping(files.document(str(manifest.get("Config"))), "configuration")
    return files.layers(layers), documents.mapping(config.get("config") or {}, "configuration")


def _oci(files: _Files) -> tuple[Iterator[IO[bytes]], Mapping[str, Any]]:
    found = documents.mapping(files.document("index.json"), "index")
    for _ in range(1 + MAX_INDEXES):
        if "manifests" not in found:
            break
        chosen = documents.for_this_machine(found)
        found = documents.mapping(files.document(_blob(chosen)), "manifest")
    else:
        raise documents.bad("its indexes lead only to one another")
    layers = [_blob(layer) for layer in documents.mappings(found.get("layers"), "layers")]
    described = documents.mapping(found.get("config"), "configuration")
    config = documents.mapping(files.document(_blob(described)), "configuration")
    return files.layers(layers), documents.mapping(config.get("config") or {}, "configuration")


class _Files:
    """The files of an archive that can be a part of an image. The others are only counted."""

    def __init__(self, archive: tarfile.TarFile, budget: Budget) -> None:
        self._archive = archive
        self._found: dict[str, tarfile.TarInfo] = {}
        self._too_many = False
        for member in members(archive):
            budget.entry()
            name = posixpath.normpath(member.name)
            if not (member.isreg() or member.issym() or member.islnk()) or name.count("/") >= _MAX_DEPTH:
                continue
            if len(self._found) < _MAX_FILES:
                self._found[name] = member
            else:
                self._too_many = True

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def document(self, name: str) -> Any:
        member = self._file(name)
        if member.size > MAX_DOCUMENT_BYTES:
            raise documents.bad(f"{name[:100]!r} in it is larger than {MAX_DOCUMENT_BYTES} bytes")
        with self._open(member) as file:
            return documents.parse(file.read(), name[:100])

    def layers(self, names: list[str]) -> Iterator[IO[bytes]]:
        check_layers(len(names))
        found = [self._file(name) for name in names]
        return (self._open(member) for member in found)

    def _open(self, member: tarfile.TarInfo) -> IO[bytes]:
        file = self._archive.extractfile(member)
        assert file is not None  # it is a regular one
        return file

    def _file(self, name: str) -> tarfile.TarInfo:
        """The regular file of that name. Older versions of docker put links to layers that are there already."""
        at = posixpath.normpath(name)
        for _ in range(8):
            member = self._found.get(at)
            if member is None:
                break
            if member.isreg():
                return member
            folder = posixpath.dirname(at) if member.issym() else ""
            at = posixpath.normpath(posixpath.join(folder, member.linkname))
        beyond = f" among its first {_MAX_FILES} files" if self._too_many else ""
        raise documents.bad(f"{name[:200]!r} is not in it{beyond}")


def _blob(descriptor: Mapping[str, Any]) -> str:
    return f"blobs/{documents.digest(descriptor.get('digest')).replace(':', '/')}"
