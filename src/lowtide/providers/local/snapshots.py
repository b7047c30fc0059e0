"""Snapshots: the upper layers of a sandbox, kept, and stacked under the sandboxes made from them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
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

_JOINED = "joined"
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
        make_passable(self.directory)
        draft = self.directory / f".{snapshot_id}"
        make_passable(draft)
        try:
            for tree in ("root", "usr"):
                source = f"{top}/{tree}"
                if not os.path.isdir(source):
                    continue
                if move:
                    os.rename(source, draft / tree)
                else:
                    copy_tree(source, str(draft / tree))
            record = dict(spec["foundation"])
            manifest = {
                "name": name,
                "created_at": time.time(),
                "base": record.get("base", "host"),
                "snapshots": [*record.get("snapshots", []), snapshot_id],
                "working_dir": spec["working_dir"],
            }
            (draft / "manifest.json").write_text(json.dumps(manifest))
            draft.rename(self.directory / snapshot_id)
        except BaseException:
            if not move:  # moved layers are all there is of them
                remove_tree(draft)
            raise
        return snapshot_id

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
        if (
            len(chain) > 1
            and sum(len(os.fsencode(path)) for path in self._trees(chain, "root")) > _MOST_BYTES
        ):
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
        draft = self.directory / f".{_JOINED}-{os.urandom(8).hex()}"
        make_passable(draft)
        try:
            for tree in ("root", "usr"):
                layers = [path for path in self._trees(chain, tree) if os.path.isdir(path)]
                if layers:
                    join_trees(layers, str(draft / tree))
            os.rename(draft, top / _JOINED)
        except OSError as error:
            if not (top / _JOINED).is_dir():
                raise SandboxUnavailableError(
                    f"the {len(chain)} layers of snapshot {chain[-1]} are more than a mount can hold, and they "
                    f"cannot be joined: {error}",
                    provider="local",
                ) from error
        finally:
            remove_tree(draft)

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
            os.rename(self.directory / snapshot_id, gone)
        except FileNotFoundError:
            return False
        remove_tree(gone)
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
