"""Snapshots: the upper layers of a sandbox, kept, and stacked under the sandboxes made from them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide import arguments
from lowtide.errors import SandboxNotFoundError, ValidationError
from lowtide.providers.local.base_layers import BaseLayers
from lowtide.providers.local.sandbox_directory import SandboxDirectory, sandbox_directories, valid_id
from lowtide.trees.copy import copy_tree
from lowtide.trees.passable import make_passable
from lowtide.trees.remove import remove_tree


class SnapshotStore:
    """`LOWTIDE_HOME/local/snapshots/<snapshot id>/{root,usr,manifest.json}`."""

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
        chain = arguments.strings("snapshot chain", manifest.get("snapshots"))
        missing = [link for link in chain if self._manifest(link) is None]
        if missing:
            raise SandboxNotFoundError(
                f"snapshot {snapshot_id} stands on {', '.join(missing)}, which is gone", provider="local"
            )
        roots = [str(self.directory / link / "root") for link in chain]
        usrs = [str(self.directory / link / "usr") for link in chain]
        return BaseLayers(
            root=(*below.root, *roots),
            usr=None if below.usr is None else (*below.usr, *usrs),
            read_only=below.read_only,
            foreign=below.foreign,
            environment=below.environment,
            working_dir=arguments.absolute_path("working_dir", manifest.get("working_dir")),
            record={**below.record, "snapshots": list(chain)},
        )

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
