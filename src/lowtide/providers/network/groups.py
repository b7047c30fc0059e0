"""The control groups of a sandbox, as its proxy joins them: its work is the sandbox's, within the sandbox's limits."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_SHARED = frozenset({"cpu", "cpuacct", "memory"})
"""Of version 1. Not `pids`: there the proxy's threads would be taken from the sandbox's own processes."""


def join(pid: int) -> None:
    """Move this process into the groups of process `pid`.

    A group that this user may not join stays as it is: there the sandbox is in no group of its own either.
    """
    mounts = _mounts()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            controllers = names.split(",")
            mount = mounts.get(controllers[0])
            if mount is None or (names and not _SHARED.intersection(controllers)):
                continue
            at, root = mount
            group = Path(at) / os.path.relpath(path, root)
            with contextlib.suppress(OSError):
                if names or _SHARED.intersection((group / "cgroup.controllers").read_text().split()):
                    (group / "cgroup.procs").write_text(str(os.getpid()))


def _mounts() -> dict[str, tuple[str, str]]:
    """Where each controller is mounted, and which group is the root there. The key of version 2 is empty."""
    found: dict[str, tuple[str, str]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            kind = fields[fields.index("-") + 1 :]
            if kind[0] == "cgroup2":
                found.setdefault("", (fields[4], fields[3]))
            elif kind[0] == "cgroup":
                for name in kind[2].split(","):
                    found.setdefault(name, (fields[4], fields[3]))
    return found
