"""What the faulty service remembers: one file per sandbox, and a clock of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lowtide.providers.base import SandboxInfo, SandboxState


def info(record: Mapping[str, Any]) -> SandboxInfo:
    expires = record.get("expires")
    return SandboxInfo(
        sandbox_id=record["id"],
        state=SandboxState.RUNNING,
        labels=record["labels"],
        created_at=datetime.fromtimestamp(record["created"], UTC),
        expires_at=datetime.fromtimestamp(expires, UTC) if expires else None,
    )


def path_of(directory: Path, sandbox_id: str) -> Path:
    return directory / "sandboxes" / f"id-{quote(sandbox_id, safe='')}"


def write(directory: Path, record: Mapping[str, Any]) -> None:
    path = path_of(directory, record["id"])
    temporary = directory / f".{os.getpid()}.{record['id'][:40]}"
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


def existing(directory: Path) -> list[dict[str, Any]]:
    """What exists now: committed by now, and not run out."""
    at = now(directory)
    found = []
    for path in sorted((directory / "sandboxes").iterdir()):
        record = json.loads(path.read_text())
        if record.get("expires") is not None and record["expires"] < at:
            path.unlink()
        elif record["created"] <= at:
            found.append(record)
    return found


def offset(directory: Path) -> float:
    path = directory / "clock"
    return float(path.read_text()) if path.exists() else 0.0


def now(directory: Path) -> float:
    """The service's own clock: a step of the wall clock here is none there."""
    path = directory / "epoch"
    try:
        epoch = float(path.read_text())
    except (FileNotFoundError, ValueError):
        epoch = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        path.write_text(repr(epoch))
    return epoch + time.clock_gettime(time.CLOCK_BOOTTIME) + offset(directory)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    # A lock the kernel drops when its holder is killed.
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
