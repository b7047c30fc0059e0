"""Rooms as they are on disk: whose they are, what dead processes left, and clearing them off an image."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lowtide import machine
from lowtide.errors import LowtideError
from lowtide.providers.local import destroy
from lowtide.providers.local.sandbox_directory import (
    ProcessMark,
    SandboxDirectory,
    sandbox_directories,
    start_time,
)


def own(home: Path) -> Path:
    """Where this process makes its rooms: named so that everybody can tell whether it lives."""
    return home / "rooms" / f"{os.getpid()}.{start_time(os.getpid())}.{_namespace()}"


def sweep(home: Path) -> None:
    """Remove the rooms of processes that are gone. Those of other containers cannot be seen from here."""
    for owned in _directories(home):
        pid, _, rest = owned.name.partition(".")
        start, _, where = rest.partition(".")
        if (
            where not in (_namespace(), "")  # an earlier version did not write it down
            or not (pid.isdigit() and start.isdigit())
            or ProcessMark(int(pid), int(start)).alive()
        ):
            continue
        for directory in sandbox_directories(owned):
            _remove(home, directory)
        with contextlib.suppress(OSError):
            os.rmdir(owned)


def clear(home: Path, image: str) -> None:
    """Remove every room on that image, whichever process made it: nobody lives there yet."""
    for owned in _directories(home):
        for directory in sandbox_directories(owned):
            if (directory.spec() or {}).get("foundation", {}).get("base") != image:
                continue
            # Taken away first and ended then: who has moved in by now keeps it, who comes now finds none.
            claimed = SandboxDirectory(directory.path.with_name(os.urandom(8).hex()))
            with contextlib.suppress(FileNotFoundError):
                os.rename(directory.path, claimed.path)
                _remove(home, claimed)


def _namespace() -> str:
    return machine.namespace().replace("/", "-")


def _directories(home: Path) -> list[Path]:
    try:
        return [home / "rooms" / name for name in os.listdir(home / "rooms")]
    except FileNotFoundError:
        return []


def _remove(home: Path, directory: SandboxDirectory) -> None:
    with contextlib.suppress(OSError, LowtideError):
        destroy.destroy(directory, home / "trash", 0.0)
