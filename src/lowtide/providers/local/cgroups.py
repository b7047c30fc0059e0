"""Limits through control groups, version 2 or 1."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowtide.errors import UnsupportedError
from lowtide.providers.base import Limits

_CPU_PERIOD = 100_000
_SHARES_OF_A_PROCESS, _MOST_SHARES = 1024, 262_144
_NEEDED = {"memory_bytes": "memory", "cpu": "cpu", "pids": "pids"}
CONTROLLERS = tuple(_NEEDED.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where groups for a controller can be made."""

    version: int
    parent: Path
    """A directory in which this process may make groups with this controller."""
    own: Path
    """The group that this process is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    path: Path
    settings: tuple[tuple[str, str, str], ...]
    """(which limit, file, what to write)"""


def plan(
    name: str, limits: Limits, *, below: Mapping[Path, Path], without: frozenset[str] = frozenset()
) -> list[Group]:
    """The groups these limits need. Refuses what this machine cannot hold, before anything is made.

    `below` says, for a hierarchy's parent, in which group they go instead: the one around all sandboxes.
    """
    groups: dict[Path, list[tuple[str, str, str]]] = {}
    for attribute, controller in _NEEDED.items():
        value = getattr(limits, attribute)
        if value is None or attribute in without:
            continue
        place = hierarchy(controller)
        if isinstance(place, str):
            raise _refusal(attribute, place)
        parent = below.get(place.parent, place.parent)
        entries = groups.setdefault(parent / f"lowtide-{name}", [])
        entries += [(attribute, file, text) for file, text in settings(attribute, value, place.version)]
    return [Group(path=path, settings=tuple(entries)) for path, entries in groups.items()]


def make(groups: Sequence[Group]) -> None:
    """Make them. A process joins by writing to `cgroup.procs`."""
    try:
        for group in groups:
            limit = group.settings[0][0]
            try:
                group.path.mkdir(exist_ok=True)
                for limit, file, text in group.settings:  # noqa: B007
                    write(group.path, file, text)
            except OSError as error:
                raise _refusal(limit, f"{group.path}: {error.strerror}") from error
    except BaseException:
        remove([str(group.path) for group in groups])
        raise


def write(group: Path, file: str, text: str) -> None:
    """One setting, as `settings` names it."""
    target = group / file.removesuffix("?")
    if target.exists() or not file.endswith("?"):  # ?: only where the kernel has it
        target.write_text(text)


def settings(attribute: str, value: float, version: int) -> list[tuple[str, str]]:
    """Files and what to write to them; a name that ends in ? may be missing."""
    if attribute == "memory_bytes":
        size = str(int(value))
        if version == 2:
            return [("memory.max", size), ("memory.swap.max?", "0"), ("memory.oom.group?", "0")]
        return [
            ("memory.limit_in_bytes", size),
            ("memory.memsw.limit_in_bytes?", size),
            ("memory.swappiness?", "0"),
        ]
    if attribute == "cpu":
        quota = str(max(1000, int(value * _CPU_PERIOD)))
        if version == 2:
            return [("cpu.max", f"{quota} {_CPU_PERIOD}")]
        return [("cpu.cfs_period_us", str(_CPU_PERIOD)), ("cpu.cfs_quota_us", quota)]
    if attribute == "cpu_weight":
        if version == 2:
            return [("cpu.weight", str(int(value)))]
        # In version 1 a group is weighed against single processes, on all processors together.
        shares = int(value * _SHARES_OF_A_PROCESS / 100) * (os.cpu_count() or 1)
        return [("cpu.shares", str(min(max(2, shares), _MOST_SHARES)))]
    return [("pids.max", str(int(value)))]


def remove(groups: Sequence[str]) -> None:
    """Kill what is left in them and remove them. Their names were written down by us, in a directory only we write."""
    for group in groups:
        if not os.path.basename(group).startswith("lowtide-"):
            continue
        deadline = time.monotonic() + 5.0
        while True:
            try:
                os.rmdir(group)
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                _kill_members(group)
                time.sleep(0.002)


def _kill_members(group: str) -> None:
    # A file call that was inside when its sandbox was ended.
    with contextlib.suppress(OSError):
        for word in Path(group, "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(word), 9)


def out_of_memory(groups: Sequence[str]) -> bool:
    """Whether the kernel has killed something in them for want of memory."""
    for group in groups:
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in Path(group, file).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill" and value.strip() not in ("", "0"):
                        return True
    return False


@cache
def hierarchy(controller: str) -> Hierarchy | str:
    """Where this process can make groups with `controller`, or why it cannot."""
    own: dict[str, str] = {}
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                own[name] = path
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError as error:
        return f"/proc cannot be read: {error.strerror}"
    unified = None
    for line in mounts:
        fields = line.split()
        root, at, rest = fields[3], fields[4], fields[fields.index("-") + 1 :]
        if rest[0] == "cgroup" and controller in rest[2].split(","):
            group = Path(at) / os.path.relpath(own.get(controller, "/"), root)
            return _usable(Hierarchy(version=1, parent=group, own=group), controller)
        if rest[0] == "cgroup2":
            unified = (at, root)
    if unified is None:
        return "no cgroup filesystem is mounted"
    return _unified(Path(unified[0]), own.get("", "/"), unified[1], controller)


def _unified(mount: Path, own: str, root: str, controller: str) -> Hierarchy | str:
    """Version 2: groups go beside this process's own group, because a group with processes takes no controllers."""
    group = mount / os.path.relpath(own, root)
    candidates = [group.parent if group != mount else mount]
    if os.geteuid() == 0:
        candidates.append(mount)
    for parent in candidates:
        with contextlib.suppress(OSError):
            if controller not in (parent / "cgroup.subtree_control").read_text().split():
                if controller not in (parent / "cgroup.controllers").read_text().split():
                    continue
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
            found = _usable(Hierarchy(version=2, parent=parent, own=group), controller)
            if isinstance(found, Hierarchy):
                return found
    return f"the {controller} controller of cgroup v2 is not delegated to this user"


def _usable(place: Hierarchy, controller: str) -> Hierarchy | str:
    if not place.parent.is_dir():
        return f"{place.parent} does not exist here"
    if not os.access(place.parent, os.W_OK):
        return f"{place.parent} is not writable for this user"
    return place


FIX = (
    "run as root, or let systemd delegate the controller: `systemctl edit user@.service` with "
    "[Service] Delegate=cpu memory pids, then log in again"
)


def _refusal(attribute: str, why: str) -> UnsupportedError:
    feature = {"memory_bytes": "memory limit", "cpu": "CPU limit", "pids": "process limit"}[attribute]
    return UnsupportedError(
        f"this machine does not let lowtide hold a {feature} ({_NEEDED[attribute]} controller: {why}); {FIX}",
        provider="local",
        argument="resources",
        feature=f"{_NEEDED[attribute]}-limit",
        alternative=FIX,
    )
