"""The record of what a sandbox's network setting refused: written by the proxy, read by any process of the user.

One file for each sandbox, one JSON object in each line. The file outlives the sandbox for a few days, so that
`denied_connections()` and `lowtide history` work after its end. Names in it come from the sandbox: they are
reduced to printable ASCII before they are written, and checked again when they are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lowtide.providers.base import DeniedConnection

MOST_RECORDS = 1000
"""Each target, protocol and reason is recorded once, when it is refused for the first time."""
_KEPT_SECONDS = 7 * 24 * 3600.0
_MOST_TEXT = 253
_MOST_FILE_BYTES = 1 << 20
_PROTOCOLS = frozenset({"tcp", "udp", "dns"})


class DeniedLog:
    """Records refusals to a descriptor that was opened for appending."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._seen: set[tuple[str, int | None, str, str]] = set()

    def add(self, host: str, port: int | None, protocol: str, reason: str) -> None:
        key = (_printable(host), port, protocol, _printable(reason))
        if self._descriptor is None or key in self._seen or len(self._seen) >= MOST_RECORDS:
            return
        self._seen.add(key)
        line = {
            "at": round(time.time(), 3),
            "host": key[0],
            "port": port,
            "protocol": protocol,
            "reason": key[3],
        }
        with contextlib.suppress(OSError):  # a full disk: the refusal itself still holds
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")


class DeniedFiles:
    """The files of all sandboxes of one provider."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, sandbox_id: str) -> Path:
        return self._folder / sandbox_id

    def prepare(self, sandbox_id: str) -> Path:
        """Make room for the file of a new sandbox, and remove files that are older than a week."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        oldest = time.time() - _KEPT_SECONDS
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
        return self.path(sandbox_id)

    def read(self, sandbox_id: str) -> list[DeniedConnection]:
        """Oldest first. Empty where nothing was refused, or the file has been removed."""
        try:
            with open(self.path(sandbox_id), "rb") as file:
                data = file.read(_MOST_FILE_BYTES)
        except OSError:
            return []
        found = (_record(line) for line in data.splitlines()[:MOST_RECORDS])
        return [record for record in found if record is not None]

    def settle(self, sandbox_id: str) -> None:
        """After the sandbox has ended: keep a record only where something was refused.

        The folder stays: the proxy of another sandbox may be about to open its file there.
        """
        path = self.path(sandbox_id)
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def _record(line: bytes) -> DeniedConnection | None:
    try:
        said: Any = json.loads(line)
        at, host, port = said["at"], said["host"], said["port"]
        protocol, reason = said["protocol"], said["reason"]
        whole = isinstance(host, str) and isinstance(reason, str) and protocol in _PROTOCOLS
        if not whole or not (port is None or (isinstance(port, int) and 0 <= port < 65536)):
            return None
        when = datetime.fromtimestamp(float(at), UTC)
    except (ValueError, KeyError, TypeError, OverflowError, OSError, RecursionError):
        return None
    return DeniedConnection(
        at=when, host=_printable(host), port=port, protocol=protocol, reason=_printable(reason)
    )


def _printable(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_MOST_TEXT])
