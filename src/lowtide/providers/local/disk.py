"""A disk of a fixed size for one sandbox: a sparse file with a filesystem, mounted by the spawner."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowtide import threads
from lowtide.engine import children_take_signals
from lowtide.errors import SandboxFailedError, UnsupportedError

SMALLEST = 4 << 20


def check(owner: int | None) -> None:
    """Refuse where the machine cannot, before anything is made."""
    why = missing(owner)
    if why is not None:
        raise UnsupportedError(
            f"this machine does not let lowtide hold a disk limit: {why}",
            provider="local",
            argument="resources",
            feature="disk-limit",
            alternative="run as root with loop devices, or use the docker provider",
        )


def missing(owner: int | None) -> str | None:
    if owner is None:
        return "only root can mount a filesystem of a fixed size"
    if not os.path.exists("/dev/loop-control"):
        return "there is no /dev/loop-control"
    if _mkfs() is None:
        return "mkfs.ext4 is not installed (package e2fsprogs)"
    return None


def make(place: Path, size: int) -> None:
    mkfs = _mkfs()
    assert mkfs is not None
    image = place / "disk.img"
    with open(image, "wb") as file:
        file.truncate(max(size, SMALLEST))
    os.mkdir(place / "disk", 0o755)
    options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"
    command = [mkfs, "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", options, str(image)]
    with children_take_signals():
        done = threads.run_process(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SandboxFailedError(f"mkfs.ext4: {done.stderr.strip()}", provider="local", reason="disk")


def request(place: Path, translate: Callable[[str], str], trees: Mapping[str, int]) -> dict[str, Any]:
    """What the spawner needs to mount it."""
    return {"image": translate(f"{place}/disk.img"), "at": translate(f"{place}/disk"), "make": dict(trees)}


def _mkfs() -> str | None:
    return shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
