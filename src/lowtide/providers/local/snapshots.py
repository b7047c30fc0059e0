"""Snapshots: the upper layers of a sandbox, kept, and stacked under the sandboxes made from them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lowtide import arguments
from lowtide.errors import SandboxNotFoundError, SandboxUnavailableError, ValidationError
from lowtide.providers.local.base_layers import BaseLayers
from lowtide.providers.local.sandbox_directory import SandboxDirectory, sandbox_directories, valid_id
from lowtide.trees.copy import copy_tree
from lowtide.trees.join import join_trees
from lowtide.trees.passable import make_passable
from lowtide.trees.remove import remove_tree
from lowtide.trees.walk import DIRECTORY

_JOINED = "joined"
_UNFINISHED = (".draft-", f".{_JOINED}-", ".gone-")
_MAKING_SECONDS = 1.0
_MOST_BYTES = 2600
"""Of the paths of all layers of one mount. Its options have a page of 4,096 bytes, in which other paths are, too."""


class SnapshotStore:
    """`LOWTIDE_HOME/local/snapshots/<snapshot id>/{root,usr,manifest.json}`.

    Snapshots of sandboxes made from snapshots stand on each other. Where that are more than one mount can hold, the
    uppermost gets a directory `joined` with `{root,usr}` of all of them in one.
    """

    def __init__(self, directory: Path, owner: int | None) -> None:
        self.directory, self._owner = directory, owner

    def take(
        self,
        sandbox_directory: SandboxDirectory,
        spec: dict[str, Any],
        name: str,
        top: str,
        *,
        move: bool = False,
    ) -> str:
        """Keep what the sandbox has changed. `move`: it has ended and needs it no more.

        Of a running sandbox this is a copy while it runs: what it writes meanwhile may be in or not.
        """
        word = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip(".-_")[:80] or "snapshot"
        snapshot_id = f"{word}-{os.urandom(4).hex()}"
        record = dict(spec["foundation"])
        manifest = {
            "name": name,
            "created_at": time.time(),
            "base": record.get("base", "host"),
            "snapshots": [*record.get("snapshots", []), snapshot_id],
            "working_dir": spec["working_dir"],
        }
        make_passable(self.directory)
        if move:  # such a draft is never swept: moved layers are all there is of them
            draft = self.directory / f".moved-{snapshot_id}"
            make_passable(draft)
            self._fill(draft, top, manifest, _move)
        else:
            with self._draft("draft") as draft:
                self._fill(draft, top, manifest, copy_tree)
        return snapshot_id

    def _fill(
        self, draft: Path, top: str, manifest: dict[str, Any], bring: Callable[[str, str], None]
    ) -> None:
        for tree in ("root", "usr"):
            if os.path.isdir(f"{top}/{tree}"):
                bring(f"{top}/{tree}", str(draft / tree))
        (draft / "manifest.json").write_text(json.dumps(manifest))
        draft.rename(self.directory / manifest["snapshots"][-1])

    @contextlib.contextmanager
    def _draft(self, word: str) -> Iterator[Path]:
        """A directory to be renamed when it is whole; else it is removed. Locked, so that `sweep` can tell its maker lives."""
        path, fd = self._locked_draft(word)
        try:
            yield path
        finally:
            try:
                remove_tree(path)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has this descriptor, too
                os.close(fd)

    def _locked_draft(self, word: str) -> tuple[Path, int]:
        while True:
            path = self.directory / f".{word}-{os.urandom(8).hex()}"
            make_passable(path)
            try:
                fd = os.open(path, DIRECTORY)
            except FileNotFoundError:
                continue  # swept before it was locked, as is the one below
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if path.is_dir():
                    return path, fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def sweep(self) -> None:
        """Remove what killed processes have begun to make or to delete."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                if name.startswith(_UNFINISHED):
                    with contextlib.suppress(OSError):
                        self._sweep(self.directory / name)

    def _sweep(self, path: Path) -> None:
        fd = os.open(path, DIRECTORY)
        try:
            # A new one's maker may be about to lock it.
            if time.time() - os.fstat(fd).st_ctime > _MAKING_SECONDS:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(path)
        finally:
            os.close(fd)

    def base_layers(self, snapshot_id: str, base: Callable[[str | None], BaseLayers]) -> BaseLayers:
        manifest = self._manifest(snapshot_id)
        if manifest is None:
            raise SandboxNotFoundError(f"there is no snapshot {snapshot_id}", provider="local")
        name = arguments.text("snapshot base", manifest.get("base"))
        below = base(None if name == "host" else name)
        chain = self._from_joined(arguments.strings("snapshot chain", manifest.get("snapshots")))
        missing = [link for link in chain if self._manifest(link) is None]
        if missing:
            raise SandboxNotFoundError(
                f"snapshot {snapshot_id} stands on {', '.join(missing)}, which is gone", provider="local"
            )
        paths = (*below.root, *self._trees(chain, "root"))  # an image's layers are in the same mount
        if len(chain) > 1 and sum(len(os.fsencode(path)) for path in paths) > _MOST_BYTES:
            self._join(chain)
            chain = self._from_joined(chain)
        roots, usrs = self._trees(chain, "root"), self._trees(chain, "usr")
        return BaseLayers(
            root=(*below.root, *roots),
            usr=None if below.usr is None else (*below.usr, *usrs),
            read_only=below.read_only,
            foreign=below.foreign,
            environment=below.environment,
            working_dir=arguments.absolute_path("working_dir", manifest.get("working_dir")),
            record={**below.record, "snapshots": list(chain)},
        )

    def _from_joined(self, chain: Sequence[str]) -> list[str]:
        """The end of a chain that shows the same as all of it: what is joined holds what it stands on."""
        start = len(chain) - 1
        while start > 0 and not (self.directory / chain[start] / _JOINED).is_dir():
            start -= 1
        return list(chain[start:])

    def _trees(self, chain: Sequence[str], tree: str) -> list[str]:
        places = [self.directory / link for link in chain]
        return [str((place / _JOINED if (place / _JOINED).is_dir() else place) / tree) for place in places]

    def _join(self, chain: Sequence[str]) -> None:
        """For good: layers are never written. Of two who do it at the same time the first has done it."""
        top = self.directory / chain[-1]
        try:
            with self._draft(_JOINED) as draft:
                for tree in ("root", "usr"):
                    layers = [path for path in self._trees(chain, tree) if os.path.isdir(path)]
                    if layers:
                        join_trees(layers, str(draft / tree))
                os.rename(draft, top / _JOINED)
        except OSError as error:
            if self._manifest(chain[-1]) is None:
                raise SandboxNotFoundError(
                    f"snapshot {chain[-1]} was deleted meanwhile", provider="local"
                ) from error
            if not (top / _JOINED).is_dir():
                raise SandboxUnavailableError(
                    f"the {len(chain)} layers of snapshot {chain[-1]} are more than a mount can hold, and they "
                    f"cannot be joined: {error}",
                    provider="local",
                ) from error

    def delete(self, snapshot_id: str, sandboxes: Path) -> bool:
        """True: deleted. False: there was none. ValidationError while something stands on it."""
        if self._manifest(snapshot_id) is None:
            return False
        users = self._users(snapshot_id, sandboxes)
        if users:
            raise ValidationError(
                f"snapshot {snapshot_id} is in use by {', '.join(users[:5])}; end or delete that first",
                argument="snapshot",
                provider="local",
            )
        gone = self.directory / f".gone-{snapshot_id}-{os.urandom(4).hex()}"
        try:
            fd = os.open(self.directory / snapshot_id, DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.rename(self.directory / snapshot_id, gone)
                remove_tree(gone)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
        except FileNotFoundError:
            return False
        return True

    def _users(self, snapshot_id: str, sandboxes: Path) -> list[str]:
        users = [
            sandbox_directory.sandbox_id
            for sandbox_directory in sandbox_directories(sandboxes)
            if snapshot_id in (sandbox_directory.spec() or {}).get("foundation", {}).get("snapshots", [])
        ]
        for other in self.names():
            manifest = self._manifest(other)
            if other != snapshot_id and manifest is not None and snapshot_id in manifest["snapshots"]:
                users.append(other)
        return users

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self.directory) if valid_id(name))
        return []

    def _manifest(self, snapshot_id: str) -> dict[str, Any] | None:
        if not valid_id(snapshot_id):
            return None
        try:
            loaded = json.loads((self.directory / snapshot_id / "manifest.json").read_bytes())
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None


def _move(source: str, target: str) -> None:
    """Of a directory that nobody writes any more, also where its owner may not write."""
    mode = stat.S_IMODE(os.stat(source).st_mode)
    if mode & stat.S_IWUSR:
        os.rename(source, target)
        return
    os.chmod(source, mode | stat.S_IWUSR)
    try:
        os.rename(source, target)
    except OSError:
        os.chmod(source, mode)
        raise
    os.chmod(target, mode)
