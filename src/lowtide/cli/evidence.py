"""Proof that nothing is left: asked from the ledger, the provider, the process table and the disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lowtide.engine import engine
from lowtide.lifecycle.lease import LeaseState
from lowtide.lifecycle.leases import lifecycle
from lowtide.machine import home
from lowtide.providers.base import Labels, Provider


class Evidence:
    """Remembers what was made under one tag and counts what still exists."""

    def __init__(self, place: Provider, tag: str) -> None:
        self._place = place
        self._tag = tag
        self._ids: list[str] = []
        self._most_processes = 0
        # An argument no other program on the machine has: finds the sandboxed processes from outside.
        self.marker = f"3600.{secrets.randbelow(10**12):012d}"

    def watch(self, sandbox_id: str) -> None:
        self._ids.append(sandbox_id)

    def processes(self) -> int:
        """How many processes with our marker run on this machine, in whichever namespace."""
        count = 0
        for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
            if entry.isdigit() and self._has_marker(entry):
                count += 1
        self._most_processes = max(self._most_processes, count)
        return count

    def _has_marker(self, pid: str) -> bool:
        try:
            arguments = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return arguments[:1] == [b"sleep"] and self.marker.encode() in arguments

    def left(self) -> Iterator[tuple[str, int, int]]:
        """(where, how many are left, of how many)."""
        made = len(self._ids)
        leases = engine().run(lifecycle().leases(states=list(LeaseState), tags=(self._tag,)))
        yield (
            "open leases in the ledger",
            sum(lease.state is not LeaseState.GONE for lease in leases),
            len(leases),
        )
        yield f"sandboxes at provider {self._place.name}", engine().run(self._at_provider()), made
        if self._place.name == "local":
            directories = [home() / "local" / "sandboxes" / sandbox_id for sandbox_id in self._ids]
            yield "directories on this disk", sum(path.exists() for path in directories), made
            before = self._most_processes
            yield "processes on this machine", self.processes(), before

    async def _at_provider(self) -> int:
        count = 0
        async for info in self._place.list({}):
            labels = Labels.from_dict(info.labels)
            count += info.sandbox_id in self._ids or (labels is not None and self._tag in labels.tags)
        return count
