"""Making one sandbox: its directory, its groups and its disk, then its first process; or moving into a room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath

from lowtide import orphans
from lowtide.errors import SandboxFailedError
from lowtide.providers.base import Limits, NetworkMode, SandboxInfo, SandboxSpec, SandboxState
from lowtide.providers.inside import program
from lowtide.providers.local import bwrap, cgroups, disk, gvisor
from lowtide.providers.local.base_layers import BaseLayers
from lowtide.providers.local.prerequisites import Prerequisites
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory, boot_id
from lowtide.providers.local.spawner_client import CommandStarter, Message, SpawnerClient
from lowtide.providers.local.wait_readable import readable

_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What two sandboxes have in common when nobody inside can tell one from the other."""

    network: bool
    working_dir: str
    environment: Mapping[str, str] = field(repr=False)
    base_layers: BaseLayers


@dataclass(slots=True, kw_only=True)
class Room:
    """A sandbox that was made before anybody asked for it. It ends when its leash is closed without a word."""

    shape: Shape
    directory: SandboxDirectory
    inner: ProcessMark
    leash: socket.socket
    command_starter: CommandStarter | None = None

    def close(self) -> None:
        self.leash.close()
        if self.command_starter is not None:
            self.command_starter.close()


class Launch:
    """One create. `reserve` comes first: from then on the sandbox can be found and destroyed."""

    def __init__(
        self,
        prerequisites: Prerequisites,
        client: SpawnerClient,
        directory: SandboxDirectory,
        spec: SandboxSpec,
        base_layers: BaseLayers,
    ) -> None:
        self.prerequisites, self.client, self.directory = prerequisites, client, directory
        self.spec, self.base_layers = spec, base_layers
        self.network = spec.network is not None and spec.network.mode is NetworkMode.HOST
        self.key = program.new_key() if spec.isolation is not None else None
        """Opens a channel to the program inside, where gVisor is around the sandbox."""
        by_rlimit = frozenset() if prerequisites.owner is not None else frozenset({"pids"})
        below = {group.place.parent: group.path for group in prerequisites.bound}
        limits = spec.limits
        if limits.pids is not None and spec.network is not None and spec.network.proxied:
            from lowtide.providers.local.network import limits_with_proxy

            limits = limits_with_proxy(limits)
        self.groups = cgroups.plan(spec.lease_id, limits, below=below, without=by_rlimit)
        if spec.limits.disk_bytes is not None:
            disk.check(prerequisites.owner)

    @property
    def shape(self) -> Shape | None:
        """None: it is like no other."""
        spec, base_layers = self.spec, self.base_layers
        special = (
            spec.command or spec.snapshot or spec.lifetime_seconds or spec.limits != Limits() or self.key
        )
        if special or str(base_layers.record.get("base", "/")).startswith("/"):  # somebody's own directory
            return None
        return Shape(
            network=self.network,
            working_dir=self.working_dir,
            environment=self.environment,
            base_layers=base_layers,
        )

    def reserve(self) -> bool:
        """Its directory. False: it is already there."""
        try:
            os.mkdir(self.directory.path, 0o700)
        except FileExistsError:
            return False
        return True

    def move_in(self, room: Room) -> ProcessMark | None:
        """Make a room this sandbox: in one step it has its name, its record and its processes.

        None: it has just been cleared away.
        """
        try:
            self._write_record(room.directory)
            os.rename(room.directory.path, self.directory.path)
        except FileNotFoundError:
            room.close()
            return None
        # Only now may it outlive this process. It was alive a moment ago; if not any more, the caller sees.
        with room.leash, contextlib.suppress(OSError):
            room.leash.send(b"G")
        return room.inner

    def furnish(self) -> None:
        """What is written in the directory, before any process runs."""
        self._write_record(self.directory)
        self.make_trees()

    def _write_record(self, directory: SandboxDirectory) -> None:
        spec = self.spec
        self._now = now = time.time()
        limited = spec.limits.disk_bytes is not None
        record = {
            "labels": spec.labels.as_dict(),
            "created_at": now,
            "expires_at": now + spec.lifetime_seconds if spec.lifetime_seconds else None,
            "boot_id": boot_id(),
            "network": (spec.network.mode if spec.network else NetworkMode.NONE).value,
            # gVisor itself is one, and passes on what it is told.
            "command": spec.command is not None or self.key is not None,
            "isolation": spec.isolation.value if spec.isolation is not None else None,
            "working_dir": self.working_dir,
            "cgroups": [str(group.path) for group in self.groups],
            "bound": [str(group.path) for group in self.prerequisites.bound],
            "unheld": self.prerequisites.unheld,
            "pids": spec.limits.pids,
            "disk": self.client.translate(f"{directory.path}/disk") if limited else None,
            "foundation": dict(self.base_layers.record),
        }
        draft = f"{directory.path}/.spec"
        with open(draft, "w") as file:
            json.dump(record, file)
        os.rename(draft, f"{directory.path}/spec.json")

    def make_trees(self) -> None:
        """The directories its layers are in."""
        directory = self.directory
        if self.spec.limits.disk_bytes is None:
            for name, mode in _trees(self.base_layers).items():
                self._own_dir(f"{directory.path}/{name}", mode)
            if self.network:
                with contextlib.suppress(FileExistsError):
                    self._own_dir(f"{directory.path}/root/etc")
                with (
                    contextlib.suppress(OSError),
                    open(f"{directory.path}/root/etc/resolv.conf", "wb") as file,
                ):
                    file.write(Path("/etc/resolv.conf").read_bytes())
                    os.fchmod(file.fileno(), 0o644)
        if self.prerequisites.owner is not None:
            os.chown(directory.path, self.prerequisites.owner, self.prerequisites.owner)

    def info(self) -> SandboxInfo:
        """What `SandboxDirectory.info` reads, for the moment after it was made."""
        lifetime = self.spec.lifetime_seconds
        return SandboxInfo(
            sandbox_id=self.directory.sandbox_id,
            state=SandboxState.RUNNING,
            labels=self.spec.labels.as_dict(),
            created_at=datetime.fromtimestamp(self._now, UTC),
            expires_at=datetime.fromtimestamp(self._now + lifetime, UTC) if lifetime else None,
            unheld=tuple(self.prerequisites.unheld),
        )

    def _own_dir(self, path: str, mode: int = 0o755) -> None:
        os.mkdir(path, mode)
        os.chmod(path, mode)  # whatever the program's umask is: it is what everybody inside sees
        if self.prerequisites.owner is not None:
            os.chown(path, self.prerequisites.owner, self.prerequisites.owner)

    async def run(self, *, leash: tuple[int, int] | None = None) -> ProcessMark:
        """Everything else. On an exception the caller destroys what is there.

        With a leash, both ends of a connection, it is a room: it ends when nobody holds the first end any more.
        """
        cgroups.make(self.groups)
        if self.spec.limits.disk_bytes is not None:
            await asyncio.to_thread(disk.make, self.directory.path, self.spec.limits.disk_bytes)
        for tree in self._foreign:
            await self.prerequisites.stage(tree)
        ready_r, ready_w = leash or os.pipe()
        errors_r, errors_w = os.pipe()
        # A file and no pipe: bwrap, killed by a pipe that nobody reads any more, would leave its child waiting.
        info = os.memfd_create("info", os.MFD_CLOEXEC)
        os.set_blocking(ready_r, False)
        try:
            try:
                message = self._message(waiting=leash is not None)
                await self.client.create(message, [errors_w, info, ready_w])
            finally:
                os.close(ready_w)
                os.close(errors_w)
            runs_command = self.spec.command is not None or self.key is not None
            said = await _first_words(ready_r, until_end=runs_command)
            if said[:1] != b"R":
                raise self._failure(_drain(errors_r))
            if said[1:2] == b"E":
                raise SandboxFailedError(
                    f"the main command cannot be run: {self.spec.command[0] if self.spec.command else ''}",
                    provider="local",
                    sandbox_id=self.directory.sandbox_id,
                    reason="command",
                )
            # bwrap has said who the first process in the namespaces is before it let it run.
            pid = json.loads(os.pread(info, 4096, 0))["child-pid"]
            outer, _ = self.directory.processes()
            inner = ProcessMark.child_of(outer, pid) if outer is not None else None
            if inner is None:
                return ProcessMark(pid, 0)  # its main command has ended already: no process is this one
            with contextlib.suppress(FileNotFoundError):  # destroyed meanwhile: the caller looks
                self.directory.add_inner(inner)
            return inner
        finally:
            os.close(ready_r)
            os.close(errors_r)
            os.close(info)
            for mark in self.directory.processes():
                if mark is not None:
                    orphans.expect(mark.pid, mark.start_time)

    def _message(self, *, waiting: bool) -> Message:
        directory, spec, base_layers, client = self.directory, self.spec, self.base_layers, self.client
        top, translate = str(directory.path), client.translate_layer
        if spec.limits.disk_bytes is not None:
            top = client.translate_disk(f"{directory.path}/disk")
        overlays = [bwrap.Overlay(at="/", lowers=base_layers.root, upper=f"{top}/root", work=f"{top}/work")]
        if base_layers.usr is not None:
            overlays.append(
                bwrap.Overlay(at="/usr", lowers=base_layers.usr, upper=f"{top}/usr", work=f"{top}/usrwork")
            )
        environment = self.environment
        hostname = directory.sandbox_id[-12:].strip("-._") or "sandbox"
        nproc = str(self.prerequisites.nproc(spec.limits.pids))
        command = ["wait" if waiting else "idle", nproc, self.working_dir]
        if spec.command:
            command = ["run", nproc, self.working_dir, environment["PATH"], *spec.command]
        files: list[str] = []
        if self.key is not None:
            owner = self.prerequisites.owner
            command = ["run", gvisor.NPROC, "/", "/", *gvisor.run(owner=owner)]
            args = gvisor.arguments(
                runsc=self.prerequisites.runsc,
                overlays=overlays,
                read_only=base_layers.read_only,
                hostname=hostname,
                translate=translate,
            )
            files = gvisor.files(
                command=spec.command,
                working_dir=self.working_dir,
                environment=environment,
                key=self.key,
                hostname=hostname,
            )
            environment = {**environment, program.KEY: self.key.hex()}
        else:
            args = bwrap.arguments(
                overlays=overlays,
                read_only=base_layers.read_only,
                environment=environment,
                hostname=hostname,
                network=self.network,
                # The kernel shows key names by user id, and an ordinary user's sandbox has the user's.
                hidden=("/proc/keys", "/proc/key-users") if self.prerequisites.owner is None else (),
                translate=translate,
            )
        assert self.prerequisites.bwrap is not None
        return {
            "op": "create",
            "bwrap": client.translate(self.prerequisites.bwrap.path),
            "dir": client.translate(str(directory.path)),
            "foreign": [[tree, client.staged[tree]] for tree in self._foreign if tree in client.staged],
            "args": args,
            "files": files,
            "command": command,
            "environment": environment,
            "cgroups": [f"{group.path}/cgroup.procs" for group in self.groups],
            "lifetime": spec.lifetime_seconds,
            "disk": disk.request(directory.path, client.translate, _trees(base_layers))
            if spec.limits.disk_bytes
            else None,
        }

    @property
    def _foreign(self) -> list[str]:
        """Trees of this machine that are not staged from the beginning."""
        runsc = [os.path.dirname(self.prerequisites.runsc)] if self.key is not None else []
        return [*self.base_layers.foreign, *runsc]

    @property
    def working_dir(self) -> str:
        return self.spec.working_dir or self.base_layers.working_dir

    @property
    def environment(self) -> dict[str, str]:
        usual = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
        }
        return {**usual, **self.base_layers.environment, **self.spec.environment}

    def _failure(self, stderr: str) -> SandboxFailedError:
        from lowtide.providers.local import doctor

        why = stderr.strip() or "bwrap ended without a word"
        return SandboxFailedError(
            f"the sandbox could not be started: {why}{doctor.advice(why)}",
            provider="local",
            sandbox_id=self.directory.sandbox_id,
            reason="start",
        )


def _trees(base_layers: BaseLayers) -> dict[str, int]:
    """The directories of its upper layers, parents first, and their modes."""
    trees = ["root", "work", "usr", "usrwork"] if base_layers.usr is not None else ["root", "work"]
    modes = dict.fromkeys(trees, 0o755)
    modes.update((f"root{path}", _mode_below(base_layers, path)) for path in _mount_points(base_layers))
    return modes


def _mode_below(base_layers: BaseLayers, path: str) -> int:
    """As the uppermost layer that has it: a parent of a mount point may be for everybody, as /tmp is."""
    for layer in reversed(base_layers.root):
        at = os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in PurePath(path).parts[1:]:
                below = os.open(part, _PLACE, dir_fd=at)
                os.close(at)
                at = below
            return os.fstat(at).st_mode & 0o1777 | 0o700
        except FileNotFoundError:
            continue
        except OSError:  # a link or a file, which ours hides
            return 0o755
        finally:
            os.close(at)
    return 0o755


def _mount_points(base_layers: BaseLayers) -> list[str]:
    """Where something is mounted: made by us in the upper layer, on layers that somebody else has written.

    bubblewrap looks for these places while the old root is still there. A link in a layer below would lead it
    out; a directory above it hides the link.
    """
    if base_layers.record == {"base": "host"}:
        return []
    wanted: dict[str, None] = {}
    for path in (
        "/dev",
        "/proc",
        *(("/usr",) if base_layers.usr is not None else ()),
        *(tree.path for tree in base_layers.read_only),
    ):
        wanted.update(dict.fromkeys(str(parent) for parent in reversed(PurePath(path).parents)))
        wanted[path] = None
    wanted.pop("/")
    return list(wanted)


async def _first_words(fd: int, *, until_end: bool) -> bytes:
    """What the first process says: R when it runs, then E when its command cannot be; nothing when it never ran."""
    said = b""
    while True:
        try:
            data = os.read(fd, 16)
        except BlockingIOError:
            await readable(fd)
            continue
        said += data
        if not data or (said and not until_end):
            return said


def _drain(fd: int) -> str:
    os.set_blocking(fd, False)
    with contextlib.suppress(OSError):
        return os.read(fd, 65536).decode("utf-8", "replace")
    return ""
