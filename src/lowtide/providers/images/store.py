"""The image store: images that were imported or pulled, unpacked and ready to stand on."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

from lowtide.errors import ValidationError
from lowtide.providers.images.archive import read_archive
from lowtide.providers.images.layers import LayerStore
from lowtide.providers.images.pull import Reference, Registry, save
from lowtide.providers.images.unpack import unpack_layer
from lowtide.trees.remove import remove_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    name: str
    layers: tuple[str, ...]
    """Directories, from the bottom up."""
    size_bytes: int
    created_at: float
    environment: Mapping[str, str]
    working_dir: str


class ImageStore:
    """`LOWTIDE_HOME/local/images/<name>/{manifest.json,0,1,…}`: layers from the bottom up."""

    def __init__(
        self,
        directory: Path,
        owner: int | None,
        in_use: Callable[[str], Sequence[str]] = lambda name: (),
    ) -> None:
        """`in_use`: who stands on an image, asked before it is replaced or removed, and once more after."""
        self.directory, self._owner, self._in_use = directory, owner, in_use
        self.layers = LayerStore(directory / ".layers", owner)

    def image(self, name: str) -> Image | None:
        """The image of that name; None when there is none."""
        manifest = self._manifest(name)
        return None if manifest is None else self._image(name, manifest)

    def _image(self, name: str, manifest: Mapping[str, Any]) -> Image:
        return Image(
            name=manifest["name"],
            layers=tuple(self._layer_paths(name, manifest)),
            size_bytes=manifest["size_bytes"],
            created_at=manifest["created_at"],
            environment=manifest.get("environment", {}),
            working_dir=manifest.get("working_dir") or "/",
        )

    def _layer_paths(self, image: str, manifest: Mapping[str, Any]) -> list[str]:
        shared = manifest.get("diff_ids")
        if shared is not None:
            return [str(self.layers.path(diff_id)) for diff_id in shared]
        return [str(self._place(image) / str(number)) for number in range(manifest["layers"])]

    def import_file(self, name: str, file: Path) -> Image:
        """From `docker save`, an OCI layout in a tar, or a tar of a root filesystem (each also gzipped)."""
        try:
            with tarfile.open(file) as archive:
                layers, config = read_archive(archive)
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
            manifest = _new_manifest(name, config, layers=count, size_bytes=_size(draft))
            (draft / "manifest.json").write_text(json.dumps(manifest))
            self._replace(name, draft)
        finally:
            remove_tree(draft)
        return self._image(name, manifest)

    def _replace(self, name: str, draft: Path) -> None:
        place = self._place(name)
        old = self.directory / f".{os.urandom(6).hex()}"
        with contextlib.suppress(FileNotFoundError):
            self._refuse_if_used(name)
            os.rename(place, old)
            self._in_use(name)  # clears what was made ahead on it in between
        os.rename(draft, place)
        remove_tree(old)

    def pull(self, name: str, *, only_missing: bool = False) -> Image:
        """Fetch an image from its registry, for this machine; what is already here is not fetched again.

        Raises SandboxUnavailableError (the registry cannot be reached), AuthenticationError, ValidationError (no
        such image, or one that is not what it says), MissingDependencyError (the extra `oci`).
        """
        reference = Reference.parse(name)
        registry = Registry(reference)
        with self._one_at_a_time(name):
            there = self._manifest(name)
            if there is not None and only_missing:
                return self._image(name, there)
            found = registry.image()
            if there is not None and there.get("digest") == found.digest:
                return self._image(name, there)
            with self.layers.adding():
                for blob, diff_id in zip(found.layers, found.diff_ids, strict=True):
                    if not self.layers.has(diff_id):
                        with self.layers.scratch() as file:
                            save(registry.blob(blob), file)
                            file.seek(0)
                            self.layers.add(diff_id, file)
                manifest = _new_manifest(
                    name,
                    found.config,
                    layers=len(found.layers),
                    size_bytes=sum(_size(self.layers.path(diff_id)) for diff_id in set(found.diff_ids)),
                    digest=found.digest,
                    diff_ids=list(found.diff_ids),
                )
                draft = self.directory / f".{os.urandom(6).hex()}"
                draft.mkdir(mode=0o711)
                try:
                    (draft / "manifest.json").write_text(json.dumps(manifest))
                    self._replace(name, draft)
                finally:
                    remove_tree(draft)
        self._clean()
        return self._image(name, manifest)

    @contextlib.contextmanager
    def _one_at_a_time(self, name: str) -> Iterator[None]:
        """Two sandboxes from the same missing image fetch it once, also in two processes."""
        for path in (self.directory.parent, self.directory):
            path.mkdir(mode=0o711, parents=True, exist_ok=True)
        path = self.directory / f".{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _clean(self) -> None:
        if self.layers.directory.is_dir():
            manifests = (self._manifest(image.name) or {} for image in self.images())
            self.layers.clean(
                {diff_id for manifest in manifests for diff_id in manifest.get("diff_ids") or ()}
            )

    def images(self) -> list[Image]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.listdir(self.directory)):
                manifest = self._manifest(unquote(entry))
                if not entry.startswith(".") and manifest is not None:
                    found.append(self._image(unquote(entry), manifest))
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
        self._in_use(name)  # clears what was made ahead on it in between
        remove_tree(gone)
        self._clean()
        return True

    def _refuse_if_used(self, name: str) -> None:
        users = self._in_use(name)
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


def _new_manifest(name: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "created_at": time.time(),
        "environment": dict(item.partition("=")[::2] for item in config.get("Env") or []),
        "working_dir": config.get("WorkingDir") or "/",
        "entrypoint": config.get("Entrypoint"),
        "command": config.get("Cmd"),
        **more,
    }


def _size(top: Path) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(top) for name in names
    )
