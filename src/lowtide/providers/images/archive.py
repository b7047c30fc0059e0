"""Reading an image from a file: `docker save`, an OCI layout in a tar, or a tar of a root filesystem."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from lowtide.providers.images.pull import for_this_machine


def read_archive(archive: tarfile.TarFile) -> tuple[Iterator[IO[bytes]], dict[str, Any]]:
    names = {member.name.removeprefix("./"): member for member in archive.getmembers()}

    def read(name: str) -> Any:
        file = archive.extractfile(names[name])
        if file is None:
            raise KeyError(name)
        return json.load(file)

    def blobs(found: list[str]) -> Iterator[IO[bytes]]:
        for name in found:
            file = archive.extractfile(names[name])
            if file is None:
                raise KeyError(name)
            yield file

    if "manifest.json" in names:
        manifest = read("manifest.json")[0]
        return blobs(manifest["Layers"]), read(manifest["Config"]).get("config") or {}
    if "index.json" in names and "oci-layout" in names:
        manifest = read(_blob(for_this_machine(read("index.json")["manifests"])))
        while "manifests" in manifest:
            manifest = read(_blob(for_this_machine(manifest["manifests"])))
        config = read(_blob(manifest["config"])).get("config") or {}
        return blobs([_blob(layer) for layer in manifest["layers"]]), config
    if archive.name is None:
        raise KeyError("no manifest")
    return iter([open(os.fsdecode(archive.name), "rb")]), {}


def _blob(descriptor: Mapping[str, Any]) -> str:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    return f"blobs/{algorithm}/{digest}"
