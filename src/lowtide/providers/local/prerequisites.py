"""What the sandboxes of one home are made with: bwrap, the spawner, the skeleton layer."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import SandboxFailedError, SandboxUnavailableError
from lowtide.providers.base import SandboxSpec
from lowtide.providers.images.bounds import Bounds
from lowtide.providers.images.store import ImageStore
from lowtide.providers.local import (
    bound_groups,
    bwrap,
    container_image,
    destroy,
    first,
    gvisor,
    python_environment,
    python_trees,
    seccomp,
    skeleton,
)
from lowtide.providers.local.base_layers import BaseLayers
from lowtide.providers.local.bound import Bound
from lowtide.providers.local.snapshots import SnapshotStore
from lowtide.providers.local.spawner_client import SpawnerClient
from lowtide.trees.passable import close_to_others, make_passable

# As root, sandboxes run as this range of ids and never as the machine's root: what belongs to root
# (/proc/sys among it) is then not theirs, whatever namespace they are in.
ID_BASE = 1_819_541_504
NO_OWN_IDS = (
    "Linux 5.19 or later can map the ids of lowtide's home where that is on ext4, xfs, btrfs or tmpfs"
)
ID_COUNT = 65_536
DEFAULT_PIDS = 1024
# Where root's spawner may put its private mounts. Not /tmp: bwrap mounts over it.
_STAGING_POINTS = ["/mnt", "/media", "/srv", "/opt", "/var/lib"]


class Prerequisites:
    """Made ready on first use; one per provider."""

    def __init__(
        self, home: Path, environ: Mapping[str, str], options: Mapping[str, Any] | None = None
    ) -> None:
        """`options` are bounds, by the names that `Bound` has."""
        self.home, self._environ, self._options = home, environ, options
        self.owner = ID_BASE if os.geteuid() == 0 else None
        self.bwrap: bwrap.Bwrap | None = None
        self.client: SpawnerClient | None = None
        self._skeleton: skeleton.Skeleton | None = None
        self._masks: python_trees.Masks | None = None
        self._starting = asyncio.Lock()
        self.images = ImageStore(
            home / "images",
            self.owner,
            functools.partial(container_image.in_use, home),
            Bounds.from_environment({**os.environ, **environ}),
        )
        self.bound: list[bound_groups.Shared] = []
        self.unheld: list[str] = []
        """Which bounds cannot be held here, and why."""
        self.snapshots = SnapshotStore(home / "snapshots", self.owner)

    @functools.cached_property
    def runsc(self) -> str:
        return gvisor.find({**os.environ, **self._environ})

    async def start(self) -> SpawnerClient:
        if self.client is not None and self.client.running:
            return self.client
        async with self._starting:  # first calls come in parallel, too
            return await self._start_once()

    async def _start_once(self) -> SpawnerClient:
        if self.client is None:
            environ = {**os.environ, **self._environ}
            self.bwrap = bwrap.find(environ)
            bound = Bound.resolve(environ, self.home.parent, self._options)
            self.bound = bound_groups.shared(bound, self.home)
            self.unheld = _said(bound_groups.missing(bound))
            await asyncio.to_thread(self._prepare)
            program = first.program()
            self.client = SpawnerClient(
                {
                    "base": self.owner,
                    "count": ID_COUNT,
                    "seccomp": seccomp.filter_bytes().hex(),
                    "elf": (program or b"").hex(),
                    "home": str(self.home),
                    "trees": ["/usr", *self._bwrap_tree()],
                    "readable_trees": python_trees.trees(),
                    "points": _STAGING_POINTS,
                    "free": [bound.free_bytes, bound.free_inodes],
                    "bound": [[str(group.inner), str(group.place.own)] for group in self.bound],
                },
                self._join_bound,
            )
        await self.client.start()
        if self.owner is not None and not self.client.own_ranges:
            shared = f"ids: {NO_OWN_IDS}, so that all sandboxes share what the kernel counts for one user"
            self.unheld = list(dict.fromkeys([*self.unheld, shared]))
        return self.client

    def _join_bound(self, pid: int) -> None:
        refused = _said(bound_groups.join(self.bound, pid))
        self.unheld = list(dict.fromkeys([*self.unheld, *refused]))

    def _bwrap_tree(self) -> list[str]:
        """Where bwrap and its libraries are, when the sandboxes' range of ids could not walk there."""
        path = self.bwrap.path if self.bwrap else ""
        if path.startswith("/usr/"):
            return []
        parts = Path(path).parents
        return [str(parts[2] if len(parts) > 3 and parts[0].name == "_bin" else parts[0])]

    def _prepare(self) -> None:
        self.home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self.home, self.home / "sandboxes", self.home / "base"):
            make_passable(path)
        close_to_others(self.home, self.owner)
        (self.home / "trash").mkdir(mode=0o700, exist_ok=True)  # an end must need no room on the disk
        self._skeleton = skeleton.skeleton(self.home / "base", self.owner)
        self._masks = python_trees.Masks(self.home / "base" / "masks", self.owner)
        destroy.sweep_trash(self.home / "trash")

    async def base_layers(self, spec: SandboxSpec) -> BaseLayers:
        if spec.snapshot is not None:
            return await asyncio.to_thread(self.snapshots.base_layers, spec.snapshot, self._base)
        if spec.image is None:
            return self._base(None)
        return await asyncio.to_thread(self._base, spec.image)

    def _base(self, image: str | None) -> BaseLayers:
        """The layers without snapshots: an image, or this machine."""
        found = container_image.base_layers(self.images, image) if image is not None else None
        if found is not None:
            return found
        skeleton = self._skeleton
        if skeleton is None:
            raise SandboxUnavailableError("the provider was closed", provider="local")
        owned = (skeleton.usr,) if self.client is None or not self.client.idmapped else ()
        return BaseLayers(
            root=(skeleton.root,),
            usr=("/usr", *owned),
            read_only=self._masks.masked() if self._masks is not None else (),
            environment={"PATH": _search_path()},
            record={"base": "host"},
        )

    async def stage(self, tree: str) -> None:
        client = self.client
        if self.owner is None or client is None or client.translate(tree) != tree:
            return
        with await client.request({"op": "stage", "tree": tree}, []) as reply:
            said = await reply.next()
        if said is None or "errno" in said[0]:
            raise SandboxFailedError(
                f"{tree} cannot be used as a root filesystem", provider="local", reason="image"
            )
        client.staged[tree] = said[0]["staged"]

    def nproc(self, pids: int | None) -> int:
        # As root an explicit limit is the cgroup's, which counts over all users of the sandbox.
        return DEFAULT_PIDS if pids is None or self.owner is not None else pids

    def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()


def _said(reasons: Mapping[str, str]) -> list[str]:
    return [f"{name}: {why}" for name, why in reasons.items()]


def _search_path() -> str:
    first = [python_environment.BIN] if python_environment.interpreter() is not None else []
    return ":".join([*first, python_trees.search_path()])
