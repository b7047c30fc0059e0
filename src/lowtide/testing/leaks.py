"""The leak check: which processes, mounts, cgroups, loop devices and files of a test run are still there.

A run works under one directory with a name of its own. Whatever carries that name, or the id of a
lease in one of the run's ledgers, belongs to the run: in a process's command line, environment, open
files, mounts or cgroup; in this machine's mount table; as a cgroup; behind a loop device. So the
check sees what the code under test forgot to write down, and never another run on the same machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lowtide.providers.local import bound_groups

_LEASE_ID = re.compile("[0-9a-hjkmnp-tv-z]{26}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """One thing that should be gone."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class Watch:
    """Watches one run directory. `left()` is what of the run is still there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._leases: set[str] = set()
        self._bounds: set[str] = set()

    def learn_leases(self) -> None:
        """Read the ids of all leases in the run's ledgers. Call it before the directory goes."""
        ledgers, homes = _states(self.directory)
        for ledger in ledgers:
            self._leases.update(_lease_ids(ledger))
        for home in homes:
            self._bounds.add(bound_groups.name(home))
            self._leases.update(name for name in _names(home / "sandboxes") if len(name) == 26)

    def left(self, *, besides: Collection[int] = (), patience_seconds: float = 0.0) -> list[Leak]:
        """What is left after at most `patience_seconds`; `besides` are pids that may live on."""
        self.learn_leases()
        deadline = time.monotonic() + patience_seconds
        while True:
            found = [
                *self._processes(besides),
                *self._mounts(),
                *self._cgroups(),
                *self._loops(),
                *self._files(),
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _mine(self, text: str) -> bool:
        return (
            self.directory.name in text
            or any(name in self._leases for name in _LEASE_ID.findall(text))
            or any(name in text for name in self._bounds)
        )

    def _processes(self, besides: Collection[int]) -> Iterator[Leak]:
        spared = {os.getpid(), *besides}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid in spared:
                continue
            for label, read in _PROCESS_TRACES:
                try:
                    text = read(pid)
                except OSError:  # ended meanwhile, or not ours to look at
                    continue
                if self._mine(text):
                    yield Leak(kind="process", what=f"{pid} ({label}): {_command(pid)}")
                    break

    def _mounts(self) -> Iterator[Leak]:
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            if self._mine(line):
                yield Leak(kind="mount", what=line)

    def _cgroups(self) -> Iterator[Leak]:
        for path, names, _ in os.walk("/sys/fs/cgroup"):
            yield from (Leak(kind="cgroup", what=f"{path}/{name}") for name in names if self._mine(name))

    def _loops(self) -> Iterator[Leak]:
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                if self._mine(text := backing.read_text()):
                    yield Leak(kind="loop device", what=text.strip())

    def _files(self) -> Iterator[Leak]:
        """Sandbox directories, and what is left in the run's TMPDIR (pytest's own aside)."""
        for home in _states(self.directory)[1]:
            sandboxes = home / "sandboxes"
            yield from (Leak(kind="file", what=str(sandboxes / name)) for name in _names(sandboxes))
        temporary = self.directory / "tmp"
        if temporary.is_dir():
            for entry in temporary.iterdir():
                if not entry.name.startswith("pytest-of-"):
                    yield Leak(kind="file", what=str(entry))


def _states(directory: Path) -> tuple[list[Path], list[Path]]:
    """The ledgers in it, and the state directories of the local provider.

    By a list and no recursion, and not into what sandboxes have written: that may be deeper than the stack.
    """
    ledgers, homes, waiting = [], [], [directory]
    while waiting:
        here = waiting.pop()
        if here.name == "local" and (here / "sandboxes").is_dir():
            homes.append(here)
            continue
        with contextlib.suppress(OSError), os.scandir(here) as entries:  # gone, closed, or too long a path
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif entry.name.endswith(".db"):
                    ledgers.append(Path(entry.path))
    return ledgers, homes


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _lease_ids(ledger: Path) -> set[str]:
    try:
        with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=5.0)) as database:
            return {str(row[0]) for row in database.execute("SELECT lease_id FROM lease")}
    except sqlite3.Error:
        return set()


def _open_files(pid: int) -> str:
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if not link.startswith("/sys/fs/cgroup/"):  # whoever counts what groups use has them all open
                links.append(link)
    return "\n".join(links)


def _reader(name: str) -> Callable[[int], str]:
    def read(pid: int) -> str:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().decode(errors="replace")

    return read


_PROCESS_TRACES: tuple[tuple[str, Callable[[int], str]], ...] = (
    ("command line", _reader("cmdline")),
    ("environment", _reader("environ")),
    ("cgroup", _reader("cgroup")),
    ("mounts", _reader("mountinfo")),
    ("working directory", lambda pid: os.readlink(f"/proc/{pid}/cwd")),
    ("open files", _open_files),
)


def _command(pid: int) -> str:
    try:
        return _reader("cmdline")(pid).replace("\0", " ").strip()[:300] or _reader("comm")(pid).strip()
    except OSError:
        return "(ended)"
