"""The image store: images that were imported or pulled, unpacked and ready to stand on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

from lowtide.errors import LowtideError, ValidationError
from lowtide.providers.images.archive import read_archive
from lowtide.providers.images.bounds import Bounds, Budget, check_layers
from lowtide.providers.images.configuration import Configuration, unusable
from lowtide.providers.images.content import XZ, Content
from lowtide.providers.images.documents import words
from lowtide.providers.images.layers import LayerStore
from lowtide.providers.images.pull import Reference, Registry, save
from lowtide.providers.images.unpack import unpack_layer
from lowtide.trees.copy import copy_tree
from lowtide.trees.passable import make_passable
from lowtide.trees.remove import remove_tree
from lowtide.trees.tar import CarefulInfo
from lowtide.trees.walk import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One in the store, and what a sandbox on it stands on."""

    name: str
    size_bytes: int
    created_at: float
    layers: tuple[str, ...] = ()
    """Directories, from the bottom up."""
    configuration: Configuration = field(default_factory=Configuration)
    problem: str | None = None
    """Why it cannot be used; only ever in a listing."""


class ImageStore:
    """`LOWTIDE_HOME/local/images/<name>/{manifest.json,0,1,…}`: layers from the bottom up."""

    def __init__(
        self,
        directory: Path,
        owner: int | None,
        in_use: Callable[[str], Sequence[str]] = lambda name: (),
        bounds: Bounds = Bounds(),  # noqa: B008 (frozen)
    ) -> None:
        """`in_use`: who stands on an image, asked before it is replaced or removed, and once more after."""
        self.directory, self.owner, self._in_use, self._bounds = directory, owner, in_use, bounds
        self.layers = LayerStore(directory / ".layers", owner)

    def image(self, name: str) -> Image | None:
        """The image of that name; None when there is none."""
        manifest = self._manifest(name)
        return None if manifest is None else self._image(name, manifest)

    def _image(self, name: str, manifest: Mapping[str, Any]) -> Image:
        """Raises ValidationError for what an older version has let in."""
        try:
            configuration = Configuration.from_manifest(manifest)
            layers = tuple(self._layer_paths(name, manifest))
        except ValidationError as error:
            advice = f". `lowtide image rm {name}`, then import or pull it again"
            raise unusable(name, error, advice) from error
        return Image(**_summary(name, manifest), layers=layers, configuration=configuration)

    def _layer_paths(self, name: str, manifest: Mapping[str, Any]) -> list[str]:
        shared, count = manifest.get("diff_ids"), manifest.get("layers")
        if shared is not None:
            paths = [self.layers.path(diff_id) for diff_id in words(shared, "layers")]
        else:
            paths = [self._place(name) / str(number) for number in range(count if type(count) is int else 0)]
        check_layers(len(paths))
        return [str(path) for path in paths]

    def import_file(self, name: str, file: Path) -> Image:
        """From `docker save`, an OCI layout in a tar, or a tar of a root filesystem (each also packed)."""
        try:
            with self._opened(file) as opened, _tar(file, opened) as archive:
                layers, config = read_archive(archive, self._budget())
                return self.add(name, layers, config)
        except LowtideError:
            raise
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
            raise ValidationError(
                f"{file} is not an image: {error}", argument="file", provider="local"
            ) from error
        except OSError as error:
            raise ValidationError(
                f"{file} cannot be imported: {error}", argument="file", provider="local"
            ) from error

    @contextlib.contextmanager
    def _opened(self, file: Path) -> Iterator[IO[bytes]]:
        """The archive, for reading back and forth. xz is unpacked to the disk first: `tarfile` gives it any memory."""
        with open(file, "rb") as packed:
            if packed.read(len(XZ)) != XZ:
                packed.seek(0)
                yield packed
                return
            packed.seek(0)
            budget = self._budget()  # of its own: what is in it is counted when it is unpacked once more
            with tempfile.TemporaryFile(dir=self.directory) as plain:
                shutil.copyfileobj(Content(packed, budget), plain, 1 << 20)
                plain.seek(0)
                yield plain

    def add(self, name: str, layers: Iterable[IO[bytes]], config: Mapping[str, Any]) -> Image:
        """Put an image in the store: `layers` as (packed) tar streams from the bottom up, `config` as OCI has it."""
        if not _is_name(name):
            raise ValidationError(f"{name!r} is not an image name", argument="name", provider="local")
        configuration = _configuration(name, config)
        budget = self._budget()
        draft = self.directory / f".{os.urandom(6).hex()}"
        make_passable(draft)
        try:
            count = 0
            for count, layer in enumerate(layers, 1):
                check_layers(count)
                unpack_layer(layer, str(draft / str(count - 1)), self.owner, budget)
            check_layers(count)
            manifest = _new_manifest(name, configuration, layers=count, size_bytes=size(str(draft)))
            (draft / "manifest.json").write_text(json.dumps(manifest))
            self._replace(name, draft)
        finally:
            remove_tree(draft)
        return self._image(name, manifest)

    def _budget(self) -> Budget:
        for path in (self.directory.parent, self.directory):
            make_passable(path)
        return Budget(self._bounds, self.directory)

    def link_from(self, other: ImageStore, name: str) -> str:
        """Have an image of another store here, too, as hard links to its files: what is in it, in a word.

        ValidationError where it is not there, or has changed meanwhile.
        """
        with contextlib.ExitStack() as held:
            if other.layers.directory.is_dir():
                held.enter_context(other.layers.adding())  # nothing is cleaned away meanwhile
            manifest, image = other._manifest(name), other.image(name)
            if manifest is None or image is None:
                raise ValidationError(f"there is no image {name}", argument="name", provider="local")
            said = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
            there = self._manifest(name)
            if there is not None and there.get("linked") == said:
                return said
            self._budget()
            draft = self.directory / f".{os.urandom(6).hex()}"
            make_passable(draft)
            try:
                for number, layer in enumerate(image.layers):
                    copy_tree(layer, str(draft / str(number)), link=True)
                if other._manifest(name) != manifest:
                    raise ValidationError(
                        f"the image {name} changed meanwhile", argument="name", provider="local"
                    )
                own = {**manifest, "layers": len(image.layers), "linked": said}
                own.pop("diff_ids", None)
                (draft / "manifest.json").write_text(json.dumps(own))
                self._replace(name, draft)
            finally:
                remove_tree(draft)
        return said

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
            configuration = _configuration(name, found.config)
            budget = self._budget()
            budget.check_download(sum(blob.size for blob in found.layers))
            with self.layers.adding():
                for blob, diff_id in zip(found.layers, found.diff_ids, strict=True):
                    if not self.layers.has(diff_id):
                        with self.layers.scratch() as file:
                            save(registry.blob(blob), file)
                            file.seek(0)
                            self.layers.add(diff_id, file, budget)
                manifest = _new_manifest(
                    name,
                    configuration,
                    layers=len(found.layers),
                    size_bytes=sum(size(str(self.layers.path(diff_id))) for diff_id in set(found.diff_ids)),
                    digest=found.digest,
                    diff_ids=list(found.diff_ids),
                )
                draft = self.directory / f".{os.urandom(6).hex()}"
                make_passable(draft)
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
            make_passable(path)
        path = self.directory / f".{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _clean(self) -> None:
        if self.layers.directory.is_dir():
            manifests = [self._manifest(name) or {} for name in self._names()]
            self.layers.clean(
                {diff_id for manifest in manifests for diff_id in manifest.get("diff_ids") or ()}
            )

    def images(self) -> list[Image]:
        """All of them, also those that cannot be used: people want to see what they can remove."""
        found = []
        for name in self._names():
            manifest = self._manifest(name)
            if manifest is None:
                continue
            try:
                found.append(self._image(name, manifest))
            except ValidationError as error:
                found.append(Image(**_summary(name, manifest), problem=str(error)))
        return found

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [unquote(entry) for entry in sorted(os.listdir(self.directory)) if entry[0] != "."]
        return []

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
        if not _is_name(name):
            return None
        try:
            loaded = json.loads((self._place(name) / "manifest.json").read_bytes())
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None


def _configuration(name: str, config: Any) -> Configuration:
    try:
        return Configuration.from_oci(config)
    except ValidationError as error:
        raise unusable(name, error) from error


def _new_manifest(name: str, configuration: Configuration, **more: Any) -> dict[str, Any]:
    return {"name": name, "created_at": time.time(), **configuration.as_manifest(), **more}


def _summary(name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    bytes_, created = manifest.get("size_bytes"), manifest.get("created_at")
    return {
        "name": name,
        "size_bytes": bytes_ if isinstance(bytes_, int) else 0,
        "created_at": created if isinstance(created, int | float) else 0.0,
    }


def _is_name(name: str) -> bool:
    """What can be the name of a directory here, and of no other place."""
    return not name.startswith(("/", ".")) and 0 < len(quote(name, safe="")) <= 200


def _tar(file: Path, opened: IO[bytes]) -> tarfile.TarFile:
    """Told how it is packed: left to find out, `tarfile` tries formats with any memory that a header asks for."""
    start = opened.read(3)
    opened.seek(0)
    packing: Any = {b"\x1f\x8b": "r:gz", b"BZ": "r:bz2"}.get(start[:2], "r:")
    return tarfile.open(file, packing, opened, tarinfo=CarefulInfo)
