"""The control groups that hold the bound around all sandboxes of one home: made, joined, and removed when unused.

The outer group carries the bound. In it is one group for the spawner and everything it starts, and one for each
sandbox with limits of its own: those hold together with the bound. No process is in the outer one itself, because
version 2 takes no controllers below a group that has processes. Joining happens once, by the spawner: a create
pays nothing for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.providers.local import cgroups, freezer
from lowtide.providers.local.bound import Bound

_CONTROLLERS = {"memory_bytes": "memory", "pids": "pids", "cpu_weight": "cpu"}
_OUTER, _INNER = "lowtide-all-", "lowtide-shared"
_TRIES = 5
_REMOVED = (errno.ENOENT, errno.ENODEV)
_UNUSED_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The outer group in one hierarchy."""

    place: cgroups.Hierarchy
    path: Path
    settings: tuple[tuple[str, str, str], ...]
    """(which bound, file, what to write)"""
    controllers: tuple[str, ...]
    """What the groups in it may limit too; only version 2 has to be told."""

    @property
    def inner(self) -> Path:
        """Where the spawner goes, and every sandbox without limits of its own."""
        return self.path / _INNER


def shared(bound: Bound, home: Path) -> list[Shared]:
    """Where it can be held here."""
    found: dict[Path, tuple[cgroups.Hierarchy, list[tuple[str, str, str]]]] = {}
    for attribute, controller in _CONTROLLERS.items():
        value, place = getattr(bound, attribute), cgroups.hierarchy(controller)
        if value is not None and not isinstance(place, str):
            _, entries = found.setdefault(place.parent, (place, []))
            entries += [(attribute, *one) for one in cgroups.settings(attribute, value, place.version)]
    return [
        Shared(
            place=place,
            path=parent / name(home),
            settings=tuple(entries),
            controllers=tuple(
                controller
                for controller in cgroups.CONTROLLERS
                if _parent(controller) == parent and place.version == 2
            ),
        )
        for parent, (place, entries) in found.items()
    ]


def missing(bound: Bound) -> dict[str, str]:
    """What of it cannot be held here, and why."""
    places = {
        attribute: cgroups.hierarchy(controller)
        for attribute, controller in _CONTROLLERS.items()
        if getattr(bound, attribute) is not None
    }
    return {attribute: place for attribute, place in places.items() if isinstance(place, str)}


def join(groups: Sequence[Shared], pid: int) -> dict[str, str]:
    """Put the spawner in it. What the kernel refuses to hold after all, and why."""
    refused: dict[str, str] = {}
    for group in groups:
        for left in reversed(range(_TRIES)):
            try:
                refused |= _make(group)
                (group.inner / "cgroup.procs").write_text(str(pid))
                break
            except OSError as error:
                if left and error.errno in _REMOVED:
                    continue  # whoever ended the last sandbox has removed it at this instant
                refused |= _not_held(group, error)
                break
    sweep({group.place.parent for group in groups})
    return refused


def _make(group: Shared) -> dict[str, str]:
    refused = {}
    group.path.mkdir(exist_ok=True)
    for attribute, file, text in group.settings:
        try:
            cgroups.write(group.path, file, text)
        except OSError as error:
            if error.errno in _REMOVED:
                raise
            refused[attribute] = f"{group.path}/{file}: {error.strerror}"
    if group.controllers:
        words = " ".join(f"+{name}" for name in group.controllers)
        (group.path / "cgroup.subtree_control").write_text(words)
    group.inner.mkdir(exist_ok=True)
    return refused


def _not_held(group: Shared, error: OSError) -> dict[str, str]:
    return {attribute: f"{group.path}: {error.strerror}" for attribute, _, _ in group.settings}


def release(paths: Sequence[str], patience_seconds: float = 0.0) -> None:
    """Remove it where nothing is in it any more, and nothing else: whoever is the last one finds it empty.

    With patience, for as long as what is in it gets less: that is on its way out, and nobody comes after it.
    """
    members: list[str] | None = None
    while True:
        for path in paths:
            with contextlib.suppress(OSError):
                os.rmdir(f"{path}/{_INNER}")
            with contextlib.suppress(OSError):
                os.rmdir(path)
        # Everybody's processes are in it: the end of one sandbox must not read them all.
        if patience_seconds <= 0 or not any(map(os.path.exists, paths)):
            return
        for path in paths:
            freezer.remove_empty(f"{path}/{_INNER}")
        now = _members(paths)
        if now != members:
            members, since = now, time.monotonic()
        if time.monotonic() - since >= patience_seconds:
            return
        time.sleep(0.01)


def sweep(parents: Collection[Path]) -> None:
    """Remove the empty ones of other homes. A home that was deleted, or a container that was killed whole, leaves
    nobody who would: its last process was in the group when the last one looked.

    The kernel removes none that a process is in. One that is being joined is younger than this, or made again.
    """
    for parent in parents:
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                path = f"{parent}/{name}"
                if name.startswith(_OUTER) and time.time() - os.stat(path).st_mtime > _UNUSED_SECONDS:
                    freezer.remove_empty(f"{path}/{_INNER}")
                    release([path])


def _members(paths: Sequence[str]) -> list[str]:
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found += Path(path, _INNER, "cgroup.procs").read_text().split()
    return found


def left_over(home: Path) -> list[str]:
    """Those of this home that are there, whoever made them and with whatever bound."""
    places = [cgroups.hierarchy(controller) for controller in cgroups.CONTROLLERS]
    paths = {str(place.parent / name(home)) for place in places if not isinstance(place, str)}
    return sorted(path for path in paths if os.path.exists(path))


def name(home: Path) -> str:
    """The outer group's, for this state directory of the local provider."""
    return f"{_OUTER}{hashlib.sha256(str(home).encode()).hexdigest()[:16]}"


def _parent(controller: str) -> Path | None:
    place = cgroups.hierarchy(controller)
    return None if isinstance(place, str) else place.parent
