"""The kernel's freezer: a control group whose processes do not run, whatever signals and timers reach them.

The group of a paused sandbox is a child of the group that its processes are in, so that the limits of that one still
hold. It has no controller of its own. Once made it stays until the sandbox is destroyed; its path is in the sandbox's
directory, so that any process of the same user can thaw and remove it.

Version 2 is preferred: SIGKILL ends what is frozen there. In version 1 a killed process ends when it is thawed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowtide.providers.local import cgroups
from lowtide.providers.local.sandbox_directory import SandboxDirectory

_PREFIX = "lowtide-paused-"


@dataclass(frozen=True, slots=True)
class Freezer:
    path: str

    @property
    def version(self) -> int:
        return 1 if os.path.exists(f"{self.path}/freezer.state") else 2

    def freeze(self) -> None:
        self._set("1", "FROZEN")

    def thaw(self) -> None:
        """What was never made or is gone already is thawed."""
        with contextlib.suppress(FileNotFoundError):
            self._set("0", "THAWED")

    def _set(self, second: str, first: str) -> None:
        # Opened for writing and never created: a group that is gone is FileNotFoundError, not a new file.
        file, text = ("freezer.state", first) if self.version == 1 else ("cgroup.freeze", second)
        with open(f"{self.path}/{file}", "r+") as target:
            target.write(text)

    def frozen(self) -> bool:
        """Whether every process in the group has come to a halt."""
        if self.version == 1:
            return Path(self.path, "freezer.state").read_text().strip() == "FROZEN"
        return "frozen 1" in Path(self.path, "cgroup.events").read_text().splitlines()

    def add(self, pid: int) -> None:
        with open(f"{self.path}/cgroup.procs", "r+") as target:
            target.write(str(pid))

    def let_out(self, pid: int) -> None:
        with open(f"{os.path.dirname(self.path)}/cgroup.procs", "r+") as target:
            target.write(str(pid))

    def holds(self, pid: int, thread: int) -> bool:
        """Whether this thread is in the group."""
        return self.holds_path(f"/proc/{pid}/task/{thread}")

    def holds_path(self, task: str) -> bool:
        """The same for a thread's directory in a /proc."""
        name = os.path.basename(self.path)
        with open(f"{task}/cgroup") as file:
            return any(os.path.basename(line.rstrip("\n")) == name for line in file)


def make(directory: SandboxDirectory, pid: int) -> Freezer | str:
    """The freezer of a sandbox, empty and frozen, below the group that its process `pid` is in; or why there is none."""
    recorded = of(directory)
    if recorded is not None and os.path.isdir(recorded.path):
        recorded.freeze()
        return recorded
    why = "no cgroup filesystem with a freezer is mounted"
    for parent in _groups(pid):
        found = Freezer(f"{parent}/{_PREFIX}{directory.sandbox_id}")
        directory.set_freezer(found.path)  # first, so that whoever destroys the sandbox removes the group
        try:
            os.mkdir(found.path)
            found.freeze()
            return found
        except OSError as error:
            why = f"{parent}: {error.strerror}"
            with contextlib.suppress(OSError):
                os.rmdir(found.path)
    directory.set_freezer(None)
    return why


def of(directory: SandboxDirectory) -> Freezer | None:
    path = directory.freezer()
    if path is None or not os.path.basename(path).startswith(_PREFIX):
        return None
    return Freezer(path)


def thaw(directory: SandboxDirectory, *, only_version_1: bool = False) -> None:
    """Let the processes run, or let those that are killed end: version 1 needs that, version 2 does not."""
    found = of(directory)
    if found is not None and (found.version == 1 or not only_version_1):
        found.thaw()


def remove(directory: SandboxDirectory) -> None:
    """After the sandbox's processes have ended."""
    found = of(directory)
    if found is not None:
        found.thaw()
        cgroups.remove([found.path])


def remove_empty(parent: str) -> None:
    """Freezers below this group that nothing is in: of sandboxes whose directories were deleted."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{parent}/{name}")


def _groups(pid: int) -> Iterator[str]:
    """The groups of this process in the hierarchies that can freeze, version 2 first."""
    own: dict[str, str] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for kind, controller in (("cgroup2", ""), ("cgroup", "freezer")):
        for fields in mounts:
            rest = fields[fields.index("-") + 1 :]
            if rest[0] == kind and controller in own and (not controller or controller in rest[2].split(",")):
                yield os.path.normpath(os.path.join(fields[4], os.path.relpath(own[controller], fields[3])))
                break
