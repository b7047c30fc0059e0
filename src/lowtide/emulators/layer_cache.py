"""Layers that were built, kept for the next emulator: by what they were made of, whole or not at all, bounded.

A layer is kept as hard links to the files of the build's snapshot, and used as hard links to those: what an emulator stands
on stays, whoever removes what is kept here. Sandboxes never see this directory, and no layer below them can be written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide import machine
from lowtide.errors import ValidationError
from lowtide.providers.local import skeleton
from lowtide.trees.copy import copy_tree
from lowtide.trees.passable import make_passable
from lowtide.trees.remove import remove_tree
from lowtide.trees.walk import DIRECTORY, walk

log = logging.getLogger("lowtide.emulators")

MOST_BYTES = 10 << 30
_VARIABLE = "LOWTIDE_BUILD_CACHE_MAX_BYTES"
_LOCK_SECONDS = 10.0
_ENTRY_COSTS = 1024
_SHARE = 0.5  # of what the disk would have free without it
_KEY = re.compile(r"[0-9a-f]{64}")
_TREES = ("root", "usr")
_RECORD, _ON_DISK = "layer.json", "on-disk"
# What changes when something is installed on this machine, whose /usr is below every layer.
_INSTALLED = (
    "/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/usr/lib/sysimage/rpm/rpmdb.sqlite", "/lib/apk/db/installed",
    "/var/lib/pacman/local", "/usr", "/usr/bin", "/usr/lib", "/usr/sbin", "/usr/local", "/usr/local/bin", "/usr/local/lib",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLayer:
    key: str
    size_bytes: int
    used_at: float


class LayerCache:
    """`LOWTIDE_HOME/build-layers/<key>/{root,usr,layer.json}`. A directory there is whole: it was renamed into place."""

    def __init__(self, directory: Path, most_bytes: int = MOST_BYTES) -> None:
        self.directory, self._most = directory, most_bytes
        self._new: list[str] = []

    @classmethod
    def of(cls, home: Path, environ: Mapping[str, str] = os.environ) -> LayerCache:
        said = environ.get(_VARIABLE, "").strip()
        if said and not re.fullmatch(r"[0-9]{1,18}", said):
            raise ValidationError(f"{_VARIABLE} is a whole number, not {said!r}", argument=_VARIABLE)
        return cls(home / "build-layers", int(said) if said else MOST_BYTES)

    def take(self, key: str, snapshots: Path, below: str | None) -> str | None:
        """A kept layer as a snapshot in `snapshots`, on top of the one that is called `below`. None: there is none."""
        try:
            with self._locked(fcntl.LOCK_SH):
                record = self._record(key)
                if record is None:
                    return None
                snapshot_id = f"layer-{key[:16]}-{os.urandom(4).hex()}"
                draft = snapshots / f".{snapshot_id}"
                try:
                    self._link(self.directory / key, draft)
                    chain: dict[str, Any] = {"base": "host", "snapshots": []}
                    if below is not None:
                        chain = json.loads((snapshots / below / "manifest.json").read_bytes())
                    manifest = {
                        "name": snapshot_id,
                        "created_at": time.time(),
                        "base": chain["base"],
                        "snapshots": [*chain["snapshots"], snapshot_id],
                        "working_dir": record["working_dir"],
                    }
                    (draft / "manifest.json").write_text(json.dumps(manifest))
                    draft.rename(snapshots / snapshot_id)
                except BaseException:
                    remove_tree(draft)
                    raise
                os.utime(self.directory / key / _RECORD)
                return snapshot_id
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a layer that was kept cannot be used, so it is built again: %s", error)
            return None

    def keep(self, key: str, snapshot: Path) -> None:
        """Keep what was built. That it cannot be kept harms nobody."""
        if not self._most or not _KEY.fullmatch(key):
            return
        try:
            with self._locked(fcntl.LOCK_SH):
                place, draft = self.directory / key, self.directory / f".draft-{os.urandom(8).hex()}"
                if self._record(key) is not None:
                    return
                try:
                    self._link(snapshot, draft)
                    working_dir = json.loads((snapshot / "manifest.json").read_bytes())["working_dir"]
                    bytes_ = _cost(draft)
                    if bytes_ > self._most:
                        return
                    record = {"size_bytes": bytes_, "working_dir": working_dir, "boot": machine.boot_id()}
                    (draft / _RECORD).write_text(json.dumps(record))
                    with contextlib.suppress(OSError):  # of another boot: of no use any more
                        if self._record(key) is None:
                            self._remove(key)
                    with contextlib.suppress(OSError):  # another emulator was first: that one is as good
                        draft.rename(place)
                        self._new.append(key)
                finally:
                    remove_tree(draft)
            self.make_room(self._allowed())
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a layer is not kept for later: %s", error)

    def settle(self) -> None:
        """What this process kept outlives a power cut from here on: until then it is good for this boot only."""
        new, self._new = self._new, []
        if not new:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
                    return
            finally:
                os.close(fd)
            for key in new:
                with contextlib.suppress(FileNotFoundError):
                    (self.directory / key / _ON_DISK).touch()

    def layers(self) -> list[KeptLayer]:
        """Least recently used first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for key in os.listdir(self.directory):
                record = self._record(key, any_boot=True)
                with contextlib.suppress(OSError):
                    used = os.stat(self.directory / key / _RECORD).st_mtime
                    if record is not None:
                        found.append(KeptLayer(key=key, size_bytes=record["size_bytes"], used_at=used))
        return sorted(found, key=lambda one: one.used_at)

    def make_room(self, most_bytes: int) -> list[KeptLayer]:
        """Remove the least recently used until no more is kept, and what killed emulators left half done."""
        if not self.directory.is_dir():
            return []
        gone = []
        with self._locked(fcntl.LOCK_EX):
            kept = self.layers()
            total = sum(one.size_bytes for one in kept)
            for one in kept:
                if total <= most_bytes:
                    break
                total -= one.size_bytes
                gone.append(one)
            names = {one.key for one in kept} - {one.key for one in gone} | {".lock"}
            for name in set(os.listdir(self.directory)) - names:
                with contextlib.suppress(OSError):
                    self._remove(name)
        return gone

    def _remove(self, name: str) -> None:
        hidden = self.directory / f".gone-{os.urandom(8).hex()}"
        os.rename(self.directory / name, hidden)  # never half a layer under its name
        remove_tree(hidden)

    def _allowed(self) -> int:
        kept = sum(one.size_bytes for one in self.layers())
        return min(self._most, int((shutil.disk_usage(self.directory).free + kept) * _SHARE))

    def _link(self, source: Path, target: Path) -> None:
        make_passable(target)
        for tree in _TREES:
            if (source / tree).is_dir():
                copy_tree(str(source / tree), str(target / tree), link=True)

    def _record(self, key: str, *, any_boot: bool = False) -> dict[str, Any] | None:
        if not _KEY.fullmatch(key):
            return None
        try:
            found = json.loads((self.directory / key / _RECORD).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or type(found.get("size_bytes")) is not int:
            return None
        if not isinstance(found.get("working_dir"), str):
            return None
        # After a power cut the names may be there and the content not.
        sound = found.get("boot") == machine.boot_id() or (self.directory / key / _ON_DISK).exists()
        return found if sound or any_boot else None

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + _LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(fd, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # who holds it may have been stopped: no build waits for him for ever
                    if time.monotonic() > until:
                        raise TimeoutError(f"{self.directory} is in use by another emulator") from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(fd)


def _cost(top: Path) -> int:
    """What it takes on the disk, about: a million empty files are not for nothing, nor are directories."""
    fd = os.open(top, DIRECTORY)
    try:
        return sum(
            _ENTRY_COSTS + (entry.info.st_size if entry.own < 0 else 0)
            for entry in walk(fd)
            if not entry.left
        )
    finally:
        os.close(fd)


def foundation() -> str:
    """What every layer here stands on: this machine's own files, this Python, this user, this lowtide."""
    from lowtide import __version__

    owner = os.geteuid()
    said = hashlib.sha256(repr((__version__, sys.version, sys.prefix, owner)).encode())
    said.update(skeleton.fingerprint(owner).encode())
    paths = sysconfig.get_paths()
    for name in (*_INSTALLED, paths["purelib"], paths["platlib"]):
        with contextlib.suppress(OSError):
            found = os.stat(name)
            said.update(f"{name} {found.st_mtime_ns} {found.st_size} {found.st_ino}\n".encode())
    return said.hexdigest()
