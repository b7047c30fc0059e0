"""The local provider: the seam's calls, put together from the parts beside this file."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from lowtide.errors import (
    SandboxFailedError,
    SandboxNotFoundError,
    SandboxUnavailableError,
    UnsupportedError,
    ValidationError,
)
from lowtide.providers.base import (
    STDERR,
    STDOUT,
    Capability,
    FileEntry,
    NetworkMode,
    ProcessHandle,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
)
from lowtide.providers.local import bwrap, cgroups, destroy, disk, files, idle, layers, seccomp, snapshots
from lowtide.providers.local.foundation import Foundation
from lowtide.providers.local.images import ImageStore
from lowtide.providers.local.place import Place, ProcessMark, boot_id, places, valid_id
from lowtide.providers.local.ports import Forwarder
from lowtide.providers.local.process import LocalProcess, gone
from lowtide.providers.local.spawner_client import Message, Reply, SpawnerClient, readable

# As root, sandboxes run as this range of ids and never as the machine's root: what belongs to root
# (/proc/sys among it) is then not theirs, whatever namespace they are in.
ID_BASE = 1_819_541_504
ID_COUNT = 65_536
DEFAULT_PIDS = 4096
# Where root's spawner may put its private mounts. Not /tmp: bwrap mounts over it.
_STAGING_POINTS = ["/mnt", "/media", "/srv", "/opt", "/var/lib"]
_MARKER = "LOWTIDE_PROCESS"
# Namespaces to join: user, pid, mount, ipc, uts, cgroup; and the network where it is the sandbox's own.
_NAMESPACES, _FILE_NAMESPACES, _NETWORK = 0x3E020000, 0x10020000, 0x40000000


class LocalProvider:
    """Sandboxes on this machine. See DESIGN.md, "The local provider"."""

    name: ClassVar[str] = "local"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.IMAGE,
            Capability.COMMAND,
            Capability.STDIN,
            Capability.TTY,
            Capability.USER,
            Capability.SIGNALS,
            Capability.CPU_LIMIT,
            Capability.MEMORY_LIMIT,
            Capability.PIDS_LIMIT,
            Capability.DISK_LIMIT,
            Capability.NETWORK_NONE,
            Capability.NETWORK_FULL,
            Capability.PORTS,
            Capability.SNAPSHOT,
            Capability.LIFETIME,
        }
    )
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME, create_window_seconds=2.0, outlives_machine=False, light=True
    )
    options_type: ClassVar[type | None] = None

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self.home = home / "local"
        self._environ = {
            key: value for key in ("LOWTIDE_HOME", "LOWTIDE_BWRAP") if (value := environ.get(key)) is not None
        }
        self._environ["LOWTIDE_HOME"] = str(home)
        self._owner = ID_BASE if os.geteuid() == 0 else None
        self._bwrap: bwrap.Bwrap | None = None
        self._client: SpawnerClient | None = None
        self._skeleton: layers.Skeleton | None = None
        self._null = -1
        self._starting = asyncio.Lock()
        self._known: dict[str, _Known] = {}
        self._forwarders: dict[tuple[str, int], tuple[Forwarder, int]] = {}
        self.images = ImageStore(self.home / "images", self._owner)
        self.snapshots = snapshots.SnapshotStore(self.home / "snapshots", self._owner)

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        if options:
            unknown = ", ".join(sorted(options))
            raise ValidationError(
                f"the local provider takes no options: {unknown}", argument="options", provider="local"
            )
        return cls(_home(environ), environ)

    @property
    def account(self) -> str:
        text = f"{_machine_id()}|{os.geteuid()}|{self.home}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def credentials(self) -> dict[str, str]:
        return dict(self._environ)

    # ------------------------------------------------------------ create

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        place = self._place(spec.lease_id)
        network = self._network(spec)
        if not seccomp.supported() or idle.program() is None:
            raise UnsupportedError(
                f"the local provider does not know this machine's architecture ({os.uname().machine})",
                provider="local",
                feature="architecture",
                alternative="the docker provider",
            )
        client = await self._start()
        foundation = await self._foundation(spec)
        by_rlimit = frozenset() if self._owner is not None else frozenset({"pids"})
        groups = cgroups.plan(spec.lease_id, spec.limits, without=by_rlimit)
        if spec.limits.disk_bytes is not None:
            disk.check(self._owner)
        if not self._make_place(client, place, spec, foundation, groups):
            return await self.get(spec.lease_id)
        try:
            cgroups.make(groups)
            if spec.limits.disk_bytes is not None:
                await asyncio.to_thread(disk.make, place.path, spec.limits.disk_bytes)
            for tree in foundation.foreign:
                await self._stage(tree)
            inner = await self._launch(client, place, spec, foundation, groups, network)
        except BaseException:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._destroy, place, 0.0))
            raise
        self._known[place.sandbox_id] = _Known(
            inner=inner,
            environment=self._environment(spec, foundation),
            working_dir=spec.working_dir or foundation.working_dir,
            pids=spec.limits.pids,
            network=network,
            groups=[str(group.path) for group in groups],
        )
        info = place.info()
        if info is None:
            raise gone(place.sandbox_id, "the sandbox was ended while it was made")
        return info

    def _network(self, spec: SandboxSpec) -> bool:
        mode = spec.network.mode if spec.network else NetworkMode.NONE
        if mode is NetworkMode.ALLOW:
            raise UnsupportedError(
                "the local provider has no allow-list of hosts yet",
                provider="local",
                argument="network",
                feature="network-allow",
                alternative='network="none" or network="full"',
            )
        return mode is NetworkMode.FULL

    async def _start(self) -> SpawnerClient:
        async with self._starting:  # first calls come in parallel, too
            return await self._start_once()

    async def _start_once(self) -> SpawnerClient:
        if self._client is None:
            self._bwrap = bwrap.find({**os.environ, **self._environ})
            await asyncio.to_thread(self._prepare)
            program = idle.program()
            self._client = SpawnerClient(
                {
                    "base": self._owner,
                    "count": ID_COUNT,
                    "seccomp": seccomp.filter_bytes().hex(),
                    "elf": (program or b"").hex(),
                    "home": str(self.home),
                    "trees": ["/usr", *layers.python_prefixes(), *self._bwrap_tree()],
                    "points": _STAGING_POINTS,
                }
            )
        await self._client.start()
        return self._client

    def _bwrap_tree(self) -> list[str]:
        """Where bwrap and its libraries are, when the sandboxes' range of ids could not walk there."""
        path = self._bwrap.path if self._bwrap else ""
        known = ["/usr", *layers.python_prefixes()]
        if any(path.startswith(tree + "/") for tree in known):
            return []
        parts = Path(path).parents
        return [str(parts[2] if len(parts) > 3 and parts[0].name == "_bin" else parts[0])]

    def _prepare(self) -> None:
        self.home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self.home, self.home / "sandboxes"):
            # Passable for the sandboxes' range of ids; the state directory above is closed to everybody else.
            path.mkdir(mode=0o711, exist_ok=True)
        self._skeleton = layers.skeleton(self.home / "base", self._owner)
        destroy.sweep_trash(self.home / "trash")

    async def _foundation(self, spec: SandboxSpec) -> Foundation:
        if spec.snapshot is not None:
            return await asyncio.to_thread(self.snapshots.foundation, spec.snapshot, self._base)
        if spec.image is None:
            return self._base(None)
        return await asyncio.to_thread(self._base, spec.image)

    def _base(self, image: str | None) -> Foundation:
        """The foundation without snapshots: an image, or this machine."""
        found = self.images.foundation(image) if image is not None else None
        if found is not None:
            return found
        skeleton = self._skeleton
        if skeleton is None:
            raise SandboxUnavailableError("the provider was closed", provider="local")
        owned = (skeleton.usr,) if self._client is None or not self._client.idmapped else ()
        return Foundation(
            root=(skeleton.root,),
            usr=("/usr", *owned),
            read_only=skeleton.python,
            environment={"PATH": layers.search_path(skeleton.python)},
            record={"base": "host"},
        )

    def _make_place(
        self,
        client: SpawnerClient,
        place: Place,
        spec: SandboxSpec,
        foundation: Foundation,
        groups: Sequence[cgroups.Group],
    ) -> bool:
        """The directory and what is written in it, before any process runs. False: it is already there."""
        try:
            os.mkdir(place.path, 0o700)
        except FileExistsError:
            return False
        now = time.time()
        record = {
            "labels": spec.labels.as_dict(),
            "created_at": now,
            "expires_at": now + spec.lifetime_seconds if spec.lifetime_seconds else None,
            "boot_id": boot_id(),
            "network": (spec.network.mode if spec.network else NetworkMode.NONE).value,
            "command": spec.command is not None,
            "working_dir": spec.working_dir or foundation.working_dir,
            "cgroups": [str(group.path) for group in groups],
            "pids": spec.limits.pids,
            "disk": client.translate(f"{place.path}/disk") if spec.limits.disk_bytes is not None else None,
            "foundation": dict(foundation.record),
        }
        draft = f"{place.path}/.spec"
        with open(draft, "w") as file:
            json.dump(record, file)
        os.rename(draft, f"{place.path}/spec.json")
        if spec.limits.disk_bytes is None:
            for name in _trees(foundation):
                self._own_dir(f"{place.path}/{name}")
            if spec.network is not None and spec.network.mode is NetworkMode.FULL:
                self._own_dir(f"{place.path}/root/etc")
                with contextlib.suppress(OSError), open(f"{place.path}/root/etc/resolv.conf", "wb") as file:
                    file.write(Path("/etc/resolv.conf").read_bytes())
        if self._owner is not None:
            os.chown(place.path, self._owner, self._owner)
        return True

    def _own_dir(self, path: str) -> None:
        os.mkdir(path, 0o755)
        if self._owner is not None:
            os.chown(path, self._owner, self._owner)

    async def _stage(self, tree: str) -> None:
        client = self._client
        if self._owner is None or client is None or client.translate(tree) != tree:
            return
        with await client.request({"op": "stage", "tree": tree}, []) as reply:
            said = await reply.next()
        if said is None or "errno" in said[0]:
            raise SandboxFailedError(
                f"{tree} cannot be used as a root filesystem", provider="local", reason="image"
            )
        client.staged[tree] = said[0]["staged"]

    async def _launch(
        self,
        client: SpawnerClient,
        place: Place,
        spec: SandboxSpec,
        foundation: Foundation,
        groups: Sequence[cgroups.Group],
        network: bool,
    ) -> ProcessMark:
        environment = self._environment(spec, foundation)
        top = f"{place.path}/disk" if spec.limits.disk_bytes is not None else str(place.path)
        overlays = [bwrap.Overlay(at="/", lowers=foundation.root, upper=f"{top}/root", work=f"{top}/work")]
        if foundation.usr is not None:
            overlays.append(
                bwrap.Overlay(at="/usr", lowers=foundation.usr, upper=f"{top}/usr", work=f"{top}/usrwork")
            )
        nproc = str(self._nproc(spec.limits.pids))
        command = ["run", nproc, environment["PATH"], *spec.command] if spec.command else ["idle", nproc]
        assert self._bwrap is not None
        message: Message = {
            "op": "create",
            "bwrap": client.translate(self._bwrap.path),
            "dir": client.translate(str(place.path)),
            "args": bwrap.arguments(
                overlays=overlays,
                read_only=foundation.read_only,
                environment=environment,
                hostname=place.sandbox_id[-12:].strip("-._") or "sandbox",
                working_dir=spec.working_dir or foundation.working_dir,
                network=network,
                # The kernel shows key names by user id, and an ordinary user's sandbox has the user's.
                hidden=("/proc/keys", "/proc/key-users") if self._owner is None else (),
                translate=client.translate,
            ),
            "command": command,
            "cgroups": [f"{group.path}/cgroup.procs" for group in groups],
            "lifetime": spec.lifetime_seconds,
            "disk": disk.request(place.path, client.translate, _trees(foundation))
            if spec.limits.disk_bytes
            else None,
        }
        ready_r, ready_w = os.pipe()
        errors_r, errors_w = os.pipe()
        os.set_blocking(ready_r, False)
        try:
            try:
                reply = await client.request(message, [errors_w, ready_w])
            finally:
                os.close(ready_w)
                os.close(errors_w)
            with reply:
                said = await _first_words(ready_r, until_end=spec.command is not None)
                answer = await reply.next()
            if said[:1] == b"R" and answer is not None and "inner" in answer[0]:
                if said[1:2] == b"E":
                    raise SandboxFailedError(
                        f"the main command cannot be run: {spec.command[0] if spec.command else ''}",
                        provider="local",
                        sandbox_id=place.sandbox_id,
                        reason="command",
                    )
                _, inner = place.processes()
                if inner is not None:
                    return inner
            raise self._failure(place, _drain(errors_r), answer)
        finally:
            os.close(ready_r)
            os.close(errors_r)

    def _failure(
        self, place: Place, stderr: str, answer: tuple[Message, list[int]] | None
    ) -> SandboxFailedError:
        why = stderr.strip() or (answer[0].get("why") if answer else None) or "bwrap ended without a word"
        return SandboxFailedError(
            f"the sandbox could not be started: {why}{_advice(why)}",
            provider="local",
            sandbox_id=place.sandbox_id,
            reason="start",
        )

    def _environment(self, spec: SandboxSpec, foundation: Foundation) -> dict[str, str]:
        usual = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
        }
        return {**usual, **foundation.environment, **spec.environment}

    def _nproc(self, pids: int | None) -> int:
        # As root an explicit limit is the cgroup's, which counts over all users of the sandbox.
        return DEFAULT_PIDS if pids is None or self._owner is not None else pids

    # ------------------------------------------------------------ find, list, destroy

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        return self._place(spec.lease_id).info()

    async def get(self, sandbox_id: str) -> SandboxInfo:
        info = self._place(sandbox_id).info()
        if info is None:
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id}", provider="local", sandbox_id=sandbox_id
            )
        return info

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        while True:
            info = await self.get(sandbox_id)
            if info.state is SandboxState.PENDING:
                await asyncio.sleep(0.01)
                continue
            if info.state.terminal:
                raise gone(sandbox_id, f"the sandbox has ended: {info.reason}", info.reason or "ended")
            return info

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        wanted = labels.items()
        for place in places(self.home / "sandboxes"):
            info = place.info()
            if info is not None and wanted <= info.labels.items():
                yield info

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        place = self._place(sandbox_id)
        self._known.pop(sandbox_id, None)
        for key in [key for key in self._forwarders if key[0] == sandbox_id]:
            self._forwarders.pop(key)[0].close()
        return await asyncio.get_running_loop().run_in_executor(None, self._destroy, place, grace_seconds)

    def _destroy(self, place: Place, grace_seconds: float) -> bool:
        return destroy.destroy(place, self.home / "trash", grace_seconds)

    # ------------------------------------------------------------ commands

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        known = self._alive(sandbox_id)
        client = self._client if self._client is not None and self._client.running else await self._start()
        pidfd = known.inner.open()
        if pidfd is None:
            raise gone(sandbox_id)
        mark, key = secrets.token_hex(8), client.new_key()
        theirs: list[int] = []
        ours: list[int] = []
        streams: dict[int, int] = {}
        stdin: int | None = None
        try:
            if spec.tty is None:
                if spec.stdin:
                    stdin_r, stdin = self._pipe(write_here=True)
                    theirs.append(stdin_r)
                    ours.append(stdin)
                else:
                    if self._null < 0:
                        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                    theirs.append(self._null)
                for stream in (STDOUT, STDERR):
                    here, there = self._pipe(write_here=False)
                    streams[here] = stream
                    theirs.append(there)
                    ours.append(here)
            message: Message = {
                "op": "exec",
                "key": key,
                "argv": spec.argv,
                "env": known.environment,
                "own_env": {**spec.environment, _MARKER: mark},
                "cwd": spec.cwd or known.working_dir,
                "user": spec.user,
                "tty": [spec.tty.columns, spec.tty.rows] if spec.tty else None,
                "nproc": self._nproc(known.pids),
                "cgroups": known.procs,
                "flags": known.flags,
            }
            reply = await client.request(message, [pidfd, *theirs])
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            os.close(pidfd)
            for fd in theirs:
                if fd != self._null:
                    os.close(fd)
        process = LocalProcess(
            client=client,
            reply=reply,
            key=key,
            mark=mark,
            inner=known.inner,
            flags=known.flags,
            sandbox_id=sandbox_id,
            streams=streams,
            stdin=stdin,
        )
        if spec.tty is not None:
            await process.terminal_ready()
        return process

    def _pipe(self, *, write_here: bool) -> tuple[int, int]:
        """A pipe; the sandbox's end belongs to its root, so that /dev/stdout can be opened again."""
        read, write = os.pipe()
        os.set_blocking(write if write_here else read, False)
        if self._owner is not None:
            os.fchown(read, self._owner, self._owner)
        return read, write

    def _alive(self, sandbox_id: str) -> _Known:
        known = self._known.get(sandbox_id)
        if known is None:
            known = self._known[sandbox_id] = self._learn(sandbox_id)
        return known

    def _learn(self, sandbox_id: str) -> _Known:
        """A sandbox that another process made."""
        place = self._place(sandbox_id)
        spec = place.spec()
        if spec is None:
            raise gone(sandbox_id, f"there is no sandbox {sandbox_id} any more", reason="deleted")
        _, inner = place.processes()
        if inner is None or not place.alive(spec):
            info = place.info()
            raise gone(sandbox_id, f"the sandbox has ended: {info.reason if info else 'deleted'}")
        main = destroy.main_process(inner.pid)
        environment = {}
        with contextlib.suppress(OSError):
            for item in Path(f"/proc/{main}/environ").read_bytes().split(b"\0"):
                key, equals, value = item.partition(b"=")
                if equals:
                    environment[os.fsdecode(key)] = os.fsdecode(value)
        return _Known(
            inner=inner,
            environment=environment,
            working_dir=spec["working_dir"],
            pids=spec["pids"],
            network=spec["network"] == NetworkMode.FULL,
            groups=spec["cgroups"],
        )

    # ------------------------------------------------------------ files, ports

    def _inside(self, sandbox_id: str) -> _Inside:
        return _Inside(self, sandbox_id)

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in files.read_file(self._inside(sandbox_id), _absolute(path)):
            yield chunk

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        return await files.write_file(self._inside(sandbox_id), _absolute(path), chunks, mode)

    async def stat(self, sandbox_id: str, path: str) -> FileEntry:
        return await files.stat(self._inside(sandbox_id), _absolute(path))

    async def list_dir(self, sandbox_id: str, path: str) -> Sequence[FileEntry]:
        return await files.list_dir(self._inside(sandbox_id), _absolute(path))

    async def make_dir(self, sandbox_id: str, path: str) -> None:
        await files.simple(self._inside(sandbox_id), "make_dir", _absolute(path))

    async def remove(self, sandbox_id: str, path: str, *, recursive: bool) -> None:
        await files.simple(self._inside(sandbox_id), "remove", _absolute(path), recursive=recursive)

    async def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in files.read_tree(self._inside(sandbox_id), _absolute(path)):
            yield chunk

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        await files.write_tree(self._inside(sandbox_id), _absolute(path), chunks)

    async def url(self, sandbox_id: str, port: int) -> Url:
        known = self._alive(sandbox_id)
        if not known.inner.alive():
            raise gone(sandbox_id)
        if known.network:
            return Url(url=f"http://127.0.0.1:{port}")
        entry = self._forwarders.get((sandbox_id, port))
        if entry is None:
            forwarder = Forwarder(self._inside(sandbox_id), port)
            entry = self._forwarders[sandbox_id, port] = (forwarder, await forwarder.start())
        return Url(url=f"http://127.0.0.1:{entry[1]}")

    # ------------------------------------------------------------ snapshots

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        place = self._place(sandbox_id)
        spec = place.spec()
        if spec is None:
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id}", provider="local", sandbox_id=sandbox_id
            )
        return await asyncio.to_thread(self.snapshots.take, place, spec, name, _upper(place, spec))

    async def snapshot_and_destroy(self, sandbox_id: str, name: str, *, grace_seconds: float = 0.0) -> str:
        """The same as both calls, without the copy: the layers change their owner."""
        place = self._place(sandbox_id)
        spec = place.spec()
        if spec is None:
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id}", provider="local", sandbox_id=sandbox_id
            )
        if spec["disk"]:
            taken = await self.snapshot(sandbox_id, name)
        else:
            taken = await asyncio.to_thread(self._stop_and_take, place, spec, name, grace_seconds)
        await self.destroy(sandbox_id)
        return taken

    def _stop_and_take(self, place: Place, spec: dict[str, Any], name: str, grace_seconds: float) -> str:
        destroy.stop(place, grace_seconds)
        return self.snapshots.take(place, spec, name, str(place.path), move=True)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return await asyncio.to_thread(self.snapshots.delete, snapshot_id, self.home / "sandboxes")

    async def list_snapshots(self) -> Sequence[str]:
        return await asyncio.to_thread(self.snapshots.names)

    async def aclose(self) -> None:
        for forwarder, _ in self._forwarders.values():
            forwarder.close()
        self._forwarders.clear()
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._null >= 0:
            os.close(self._null)
            self._null = -1
        await asyncio.get_running_loop().run_in_executor(None, destroy.wait_removed)

    def _place(self, sandbox_id: str) -> Place:
        if not valid_id(sandbox_id):
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id!r}", provider="local", sandbox_id=sandbox_id
            )
        return Place(self.home / "sandboxes" / sandbox_id)


class _Known:
    """What entering a live sandbox takes."""

    __slots__ = ("environment", "flags", "inner", "network", "pids", "procs", "working_dir")

    def __init__(
        self,
        *,
        inner: ProcessMark,
        environment: dict[str, str],
        working_dir: str,
        pids: int | None,
        network: bool,
        groups: Sequence[str],
    ) -> None:
        self.inner, self.environment, self.working_dir = inner, environment, working_dir
        self.pids, self.network = pids, network
        self.procs = [f"{group}/cgroup.procs" for group in groups]
        self.flags = _NAMESPACES | (0 if network else _NETWORK)


class _Inside:
    """Runs the spawner's calls in one sandbox."""

    def __init__(self, provider: LocalProvider, sandbox_id: str) -> None:
        self._provider, self.sandbox_id = provider, sandbox_id

    async def __call__(self, call: str, fds: list[int], **details: Any) -> Reply:
        provider = self._provider
        known = provider._alive(self.sandbox_id)
        client = await provider._start()
        pidfd = known.inner.open()
        if pidfd is None:
            raise gone(self.sandbox_id)
        flags = _FILE_NAMESPACES | (_NETWORK if call == "sockets" and not known.network else 0)
        try:
            message = {"op": "call", "call": call, "cgroups": known.procs, "flags": flags, **details}
            return await client.request(message, [pidfd, *fds])
        finally:
            os.close(pidfd)


def _upper(place: Place, spec: Mapping[str, Any]) -> str:
    """Where its upper layers can be read: a disk of its own is mounted only where its processes are."""
    outer, _ = place.processes()
    if not spec["disk"]:
        return str(place.path)
    if outer is None or not outer.alive():
        raise gone(place.sandbox_id, "the sandbox has ended, and the disk of a fixed size with it")
    return f"/proc/{outer.pid}/root{spec['disk']}"


def _trees(foundation: Foundation) -> list[str]:
    return ["root", "work", "usr", "usrwork"] if foundation.usr is not None else ["root", "work"]


def _absolute(path: str) -> str:
    return path if path.startswith("/") else "/" + path


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


def _advice(why: str) -> str:
    from lowtide.providers.local import doctor

    return doctor.advice(why)


def _home(environ: Mapping[str, str]) -> Path:
    """As the lifecycle computes it; a provider imports nothing above it."""
    named = environ.get("LOWTIDE_HOME")
    if named:
        return Path(named).absolute()
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "lowtide"


def _machine_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return os.uname().nodename
