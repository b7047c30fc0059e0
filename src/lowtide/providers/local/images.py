"""The image store: root filesystems that were imported, and what a `container_image` stands for."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import sys
import tarfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

from lowtide.errors import UnsupportedError, ValidationError
from lowtide.providers.local.destroy import remove_tree
from lowtide.providers.local.foundation import Foundation
from lowtide.providers.local.place import places
from lowtide.providers.local.unpack import unpack_layer

_PYTHON = re.compile(r"(?:(?:docker\.io/)?library/|docker\.io/)?python:(\d+\.\d+)(?:[.-][\w.-]*)?$")
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    name: str
    layers: int
    size_bytes: int
    created_at: float


class ImageStore:
    """`LOWTIDE_HOME/local/images/<name>/{manifest.json,0,1,…}`: layers from the bottom up."""

    def __init__(self, directory: Path, owner: int | None) -> None:
        self.directory, self._owner = directory, owner

    def foundation(self, image: str) -> Foundation | None:
        """What a sandbox on this image stands on; None: this machine's own Python stands in."""
        if image.startswith("/"):
            return self._directory(image)
        manifest = self._manifest(image)
        if manifest is not None:
            place = self._place(image)
            return Foundation(
                root=tuple(str(place / str(number)) for number in range(manifest["layers"])),
                environment=manifest.get("environment", {}),
                working_dir=manifest.get("working_dir") or "/",
                record={"base": image},
            )
        match = _PYTHON.match(image)
        if match and match[1] == f"{sys.version_info.major}.{sys.version_info.minor}":
            if image not in _warned:
                _warned.add(image)
                warnings.warn(
                    f"the image {image} is not in the local store: this machine's own Python {match[1]} stands in. "
                    f"`lowtide image import {image} FILE.tar` puts the real one there",
                    stacklevel=2,
                )
            return None
        raise ValidationError(
            f"the image {image} is not in the local store. Run `lowtide image import {image} FILE.tar` with a file "
            f"from `docker save`, or `lowtide image pull {image}`; a root filesystem directory works too",
            argument="container_image",
            provider="local",
        )

    def _directory(self, path: str) -> Foundation:
        real = os.path.realpath(path)
        if not os.path.isdir(real) or real == "/":
            raise ValidationError(
                f"{path} is not a root filesystem directory", argument="container_image", provider="local"
            )
        return Foundation(root=(real,), foreign=(real,), working_dir="/", record={"base": path})

    def import_file(self, name: str, file: Path) -> Image:
        """From `docker save`, an OCI layout in a tar, or a tar of a root filesystem (each also gzipped)."""
        try:
            with tarfile.open(file) as archive:
                layers, config = _read_archive(archive)
                return self.add(name, layers, config)
        except (tarfile.TarError, EOFError, KeyError, gzip.BadGzipFile) as error:
            raise ValidationError(
                f"{file} is not an image: {error}", argument="file", provider="local"
            ) from error
        except OSError as error:
            raise ValidationError(
                f"{file} cannot be imported: {error}", argument="file", provider="local"
            ) from error

    def add(self, name: str, layers: Iterable[IO[bytes]], config: Mapping[str, Any]) -> Image:
        """Put an image in the store: `layers` as (gzipped) tar streams from the bottom up, `config` as OCI has it."""
        if not name or name.startswith(("/", ".")) or "\0" in name:
            raise ValidationError(f"{name!r} is not an image name", argument="name", provider="local")
        self.directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o711, exist_ok=True)
        draft = self.directory / f".{os.urandom(6).hex()}"
        draft.mkdir(mode=0o711)
        try:
            count = 0
            for count, layer in enumerate(layers, 1):
                unpack_layer(layer, str(draft / str(count - 1)), self._owner)
            environment = dict(item.partition("=")[::2] for item in config.get("Env") or [])
            manifest = {
                "name": name,
                "layers": count,
                "size_bytes": _size(draft),
                "created_at": time.time(),
                "environment": environment,
                "working_dir": config.get("WorkingDir") or "/",
                "entrypoint": config.get("Entrypoint"),
                "command": config.get("Cmd"),
            }
            (draft / "manifest.json").write_text(json.dumps(manifest))
            self._replace(name, draft)
        finally:
            remove_tree(draft)
        return _image(manifest)

    def _replace(self, name: str, draft: Path) -> None:
        place = self._place(name)
        old = self.directory / f".{os.urandom(6).hex()}"
        with contextlib.suppress(FileNotFoundError):
            self._refuse_if_used(name)
            os.rename(place, old)
        os.rename(draft, place)
        remove_tree(old)

    def pull(self, name: str) -> Image:
        """Fetch an image from a registry."""
        raise UnsupportedError(
            f"pulling images is not available yet; run `lowtide image import {name} FILE.tar`",
            provider="local",
            feature="image-pull",
            alternative="lowtide image import",
        )

    def images(self) -> list[Image]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.listdir(self.directory)):
                manifest = self._manifest(unquote(entry))
                if not entry.startswith(".") and manifest is not None:
                    found.append(_image(manifest))
        return found

    def remove(self, name: str) -> bool:
        """True: removed. False: there was none. ValidationError while a sandbox stands on it."""
        if self._manifest(name) is None:
            return False
        self._refuse_if_used(name)
        gone = self.directory / f".{os.urandom(6).hex()}"
        try:
            os.rename(self._place(name), gone)
        except FileNotFoundError:
            return False
        remove_tree(gone)
        return True

    def _refuse_if_used(self, name: str) -> None:
        home = self.directory.parent
        users = [
            place.sandbox_id
            for place in places(home / "sandboxes")
            if (place.spec() or {}).get("foundation", {}).get("base") == name
        ]
        for manifest in (home / "snapshots").glob("[!.]*/manifest.json"):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(manifest.read_bytes()).get("base") == name:
                    users.append(manifest.parent.name)
        if users:
            raise ValidationError(
                f"the image {name} is in use by {', '.join(users[:5])}", argument="name", provider="local"
            )

    def _place(self, name: str) -> Path:
        return self.directory / quote(name, safe="")

    def _manifest(self, name: str) -> dict[str, Any] | None:
        try:
            loaded = json.loads((self._place(name) / "manifest.json").read_bytes())
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None


def _image(manifest: Mapping[str, Any]) -> Image:
    return Image(
        name=manifest["name"],
        layers=manifest["layers"],
        size_bytes=manifest["size_bytes"],
        created_at=manifest["created_at"],
    )


def _size(top: Path) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(top) for name in names
    )


def _read_archive(archive: tarfile.TarFile) -> tuple[Iterator[IO[bytes]], dict[str, Any]]:
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
        manifest = read(_blob(_for_this_machine(read("index.json")["manifests"])))
        while "manifests" in manifest:
            manifest = read(_blob(_for_this_machine(manifest["manifests"])))
        config = read(_blob(manifest["config"])).get("config") or {}
        return blobs([_blob(layer) for layer in manifest["layers"]]), config
    if archive.name is None:
        raise KeyError("no manifest")
    return iter([open(os.fsdecode(archive.name), "rb")]), {}


def _blob(descriptor: Mapping[str, Any]) -> str:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    return f"blobs/{algorithm}/{digest}"


def _for_this_machine(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    own = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine)
    for manifest in manifests:
        if manifest.get("platform", {}).get("architecture", own) == own:
            return manifest
    raise KeyError(f"nothing for {own} in the index")
