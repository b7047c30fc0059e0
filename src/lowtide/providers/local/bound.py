"""The bound around all sandboxes of one home: defaults from this machine's size, so that they cannot use it up.

One control group holds the spawner, and with it everything it starts: nothing is made or joined for a single
sandbox, so the bound costs a create nothing. A sandbox with limits of its own has a group of its own instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import ValidationError
from lowtide.providers.local import cgroups

MEMORY, PIDS = "LOWTIDE_LOCAL_MEMORY_BYTES", "LOWTIDE_LOCAL_PIDS"
_MEMORY_SHARE = 0.75
_PIDS_SHARE = 0.5
_CONTROLLERS = {"memory_bytes": "memory", "pids": "pids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What all sandboxes together may use. None: as much as they like."""

    memory_bytes: int | None
    pids: int | None
    sources: Mapping[str, str]
    """Where each came from: a variable's name, or `default`."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Bound:
        memory, memory_source = _setting(environ, MEMORY, int(_memory() * _MEMORY_SHARE))
        pids, pids_source = _setting(environ, PIDS, int(_most_processes() * _PIDS_SHARE))
        sources = {"memory_bytes": memory_source, "pids": pids_source}
        return cls(memory_bytes=memory, pids=pids, sources=sources)

    def groups(self, home: Path) -> list[cgroups.Group]:
        """Where it can be held; what cannot be held here is left out, and `lowtide doctor` says so."""
        name = f"lowtide-all-{hashlib.sha256(str(home).encode()).hexdigest()[:16]}"
        found: dict[Path, list[tuple[str, str, str]]] = {}
        for attribute, controller in _CONTROLLERS.items():
            value, place = getattr(self, attribute), cgroups.hierarchy(controller)
            if value is not None and not isinstance(place, str):
                entries = found.setdefault(place.parent / name, [])
                entries += [(attribute, *one) for one in cgroups.settings(attribute, value, place.version)]
        return [cgroups.Group(path=path, settings=tuple(entries)) for path, entries in found.items()]


def join(groups: list[cgroups.Group], pid: int) -> None:
    """Put the spawner in it. Whoever removes an empty one at this instant is told by making it again."""
    for group in groups:
        for _ in range(3):
            try:
                cgroups.make([group])
                (group.path / "cgroup.procs").write_text(str(pid))
                break
            except FileNotFoundError:
                continue


def release(paths: list[str]) -> None:
    """Remove it where nothing is in it any more: the last sandbox may outlive the spawner."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _setting(environ: Mapping[str, str], name: str, otherwise: int) -> tuple[int | None, str]:
    text = environ.get(name, "").strip().lower()
    if not text:
        return otherwise, "default"
    if text == "none":
        return None, name
    if not re.fullmatch(r"[1-9][0-9]{0,17}", text):
        raise ValidationError(f"{name} must be a positive whole number or none, not {text!r}", argument=name)
    return int(text), name


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _most_processes() -> int:
    found = []
    for file in ("kernel/pid_max", "kernel/threads-max"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path("/proc/sys", file).read_text()))
    return min(found, default=32_768)
