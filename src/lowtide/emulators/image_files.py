"""Files of images for `COPY --from`: from the user's own image store, or pulled where the network may be used."""

from __future__ import annotations

import asyncio
import fnmatch
import io
import posixpath
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.emulators.dockerfile import CannotBuild
from lowtide.errors import LowtideError, SandboxFileNotFoundError
from lowtide.providers.base import NetworkMode
from lowtide.providers.images.pull import Reference
from lowtide.providers.images.store import ImageStore
from lowtide.providers.network.policy import Policy
from lowtide.providers.optional import FileEntry, FileKind

if TYPE_CHECKING:
    from lowtide.emulators.backing import Backing

_MOST_MATCHES, _MOST_LINKS = 10_000, 40


class ImageFiles:
    def __init__(self, backing: Backing, home: Path | None) -> None:
        """`home`: where the user's images are; None: nowhere."""
        self._backing, self._one_at_a_time = backing, asyncio.Lock()
        own = backing.provider.images
        self._store = None if home is None else ImageStore(home / "local" / "images", own.owner)

    async def identity(self, name: str) -> str:
        """What is in an image of that name now. CannotBuild: it cannot be had."""
        async with self._one_at_a_time:
            try:
                return await asyncio.to_thread(self._bring, name)
            except (LowtideError, OSError) as error:
                raise CannotBuild(
                    f"COPY --from={name}: there is no earlier stage of that name, and no image: {error}. "
                    f"`lowtide image pull {name}` or `lowtide image import` puts one there"
                ) from None

    def _bring(self, name: str) -> str:
        store = self._store
        if store is None:
            raise OSError("no image is pulled here")
        if store.image(name) is None:
            network = self._backing.network
            registry = Reference.parse(name).registry
            if network.mode is NetworkMode.NONE:
                raise OSError("it is not in lowtide's store, and builds have no network, so none is pulled")
            host = registry.rpartition(":")[0] if ":" in registry else registry
            if network.mode is NetworkMode.ALLOW and not Policy.of(network.allow).allows_name(host):
                raise OSError(f"it is not in lowtide's store, and {host} is not among what may be reached")
            store.pull(name, only_missing=True)
        return self._backing.provider.images.link_from(store, name)

    async def take(self, name: str, sources: tuple[str, ...], most_bytes: int) -> bytes:
        """What a COPY takes, as a tar with the same paths. No program of the image is run. CannotBuild, LowtideError."""
        data = io.BytesIO()
        sandbox_id = await self._backing.create(image=name, counted=False)
        try:
            with tarfile.open(fileobj=data, mode="w") as tar:
                for source in sources:
                    for path in await self._matches(sandbox_id, source):
                        await self._add(tar, sandbox_id, path, most_bytes - data.tell())
        finally:
            await self._backing.destroy(sandbox_id)
        return data.getvalue()

    async def _matches(self, sandbox_id: str, pattern: str) -> list[str]:
        found = ["/"]
        for part in pattern.strip("/").split("/"):
            if part in ("", "."):
                continue
            if not any(mark in part for mark in "*?["):
                found = [posixpath.join(path, part) for path in found]
                continue
            more = []
            for path in found:
                try:
                    entries = await self._backing.provider.list_dir(sandbox_id, path)
                except LowtideError:
                    continue
                more += [
                    posixpath.join(path, one.name) for one in entries if fnmatch.fnmatchcase(one.name, part)
                ]
                if len(more) > _MOST_MATCHES:
                    raise CannotBuild(f"{pattern}: more than {_MOST_MATCHES} files")
            found = more
        return found

    async def _add(self, tar: tarfile.TarFile, sandbox_id: str, path: str, most_bytes: int) -> None:
        provider, name = self._backing.provider, path.strip("/") or "."
        try:
            entry = await self._at(sandbox_id, path)
        except SandboxFileNotFoundError:
            return  # the step says that it is not there
        if entry.kind is FileKind.DIRECTORY:
            packed = await _bounded(provider.read_tree(sandbox_id, entry.path), most_bytes, path)
            with tarfile.open(fileobj=io.BytesIO(packed)) as tree:
                for member in tree:
                    member.name = posixpath.normpath(f"{name}/{member.name}")
                    if member.islnk():
                        member.linkname = posixpath.normpath(f"{name}/{member.linkname}")
                    tar.addfile(member, tree.extractfile(member) if member.isreg() else None)
            top = tarfile.TarInfo(name)  # where it is empty
            top.type, top.mode = tarfile.DIRTYPE, entry.mode & 0o7777 or 0o755
            tar.addfile(top)
        elif entry.kind is FileKind.FILE:
            content = await _bounded(provider.read_file(sandbox_id, entry.path), most_bytes, path)
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), entry.mode & 0o7777
            tar.addfile(info, io.BytesIO(content))

    async def _at(self, sandbox_id: str, path: str) -> FileEntry:
        """What is there; a link is followed inside the image."""
        for _ in range(_MOST_LINKS):
            entry = await self._backing.provider.stat(sandbox_id, path)
            if entry.target is None:
                return entry
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))
        raise CannotBuild(f"{path}: too many links")


async def _bounded(chunks: AsyncIterator[bytes], most: int, path: str) -> bytes:
    found = bytearray()
    async for chunk in chunks:
        found += chunk
        if len(found) > most:
            raise CannotBuild(f"COPY of {path}: more than fits into one copy")
    return bytes(found)
