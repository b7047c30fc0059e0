"""The local provider: the seam's calls, put together from the parts beside this file."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from lowtide import machine
from lowtide.errors import SandboxGone, SandboxNotFoundError, UnsupportedError
from lowtide.providers.base import (
    Capability,
    DeniedConnection,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    nothing_sent,
)
from lowtide.providers.images.store import ImageStore
from lowtide.providers.local import (
    bound_groups,
    destroy,
    first,
    gvisor,
    logs,
    pause,
    rooms,
    rooms_on_disk,
    seccomp,
)
from lowtide.providers.local.bound import Bound
from lowtide.providers.local.calls import LocalCalls
from lowtide.providers.local.create import Launch, Room
from lowtide.providers.local.enter import Entrance, Known
from lowtide.providers.local.prerequisites import Prerequisites
from lowtide.providers.local.process import gone
from lowtide.providers.local.sandbox_directory import (
    ProcessMark,
    SandboxDirectory,
    sandbox_directories,
    valid_id,
)
from lowtide.providers.local.snapshots import SnapshotStore
from lowtide.providers.local.spawner_client import SpawnerClient
from lowtide.providers.network.denied import DeniedFiles

# When the next one is prepared: a while after a create, so that its first command comes first; a moment after an
# end, so that its caller hears of that first.
_AFTER_CREATE_SECONDS, _AFTER_END_SECONDS = 0.05, 0.001
_RELEASE_SECONDS = 0.1  # what waited for work in the bound of all sandboxes leaves at the same time


class LocalProvider(LocalCalls):
    """Sandboxes on this machine: see docs/local.md."""

    name: ClassVar[str] = "local"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.IMAGE,
            Capability.COMMAND,
            Capability.LOGS,
            Capability.STDIN,
            Capability.TTY,
            Capability.USER,
            Capability.SIGNALS,
            Capability.CPU_LIMIT,
            Capability.MEMORY_LIMIT,
            Capability.PIDS_LIMIT,
            Capability.DISK_LIMIT,
            Capability.NETWORK_NONE,
            Capability.NETWORK_INTERNET,
            Capability.NETWORK_HOST,
            Capability.NETWORK_ALLOW,
            Capability.NETWORK_PORTS,
            Capability.DENIED_CONNECTIONS,
            Capability.GVISOR,  # where runsc is installed
            Capability.PORTS,
            Capability.SNAPSHOT,
            Capability.PAUSE,
            Capability.LIFETIME,
        }
    )
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME,
        create_window_seconds=2.0,
        outlives_machine=False,
        light=True,
        offline=True,
        gvisor_lacks=gvisor.LACKS,
    )
    options_type: ClassVar[type | None] = None

    def __init__(
        self, home: Path, environ: Mapping[str, str], options: Mapping[str, Any] | None = None
    ) -> None:
        self.home = home / "local"
        self._environ = {
            key: value
            for key in ("LOWTIDE_HOME", "LOWTIDE_BWRAP", "LOWTIDE_RUNSC")
            if (value := environ.get(key)) is not None
        }
        self._environ["LOWTIDE_HOME"] = str(home)
        self._prerequisites = Prerequisites(self.home, self._environ, options)
        self._entrance = Entrance(self._prerequisites, self._directory)
        self._rooms = rooms.Rooms(self._prerequisites)
        self._denied = DeniedFiles(self.home / "denied")
        super().__init__(self._entrance, self._prerequisites.owner)

    @property
    def images(self) -> ImageStore:
        return self._prerequisites.images

    async def has_image(self, image: str) -> bool:
        """Whether `image` is in the image store."""
        return await asyncio.to_thread(self.images.image, image) is not None

    @property
    def snapshots(self) -> SnapshotStore:
        return self._prerequisites.snapshots

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        """`options` are bounds of all sandboxes together, None for none: see docs/local.md."""
        home = home_of(environ)
        if options:
            Bound.resolve({**os.environ, **environ}, home, options)  # refuses what it does not know
        return cls(home, environ, options)

    @functools.cached_property
    def account(self) -> str:
        text = f"{_machine_id()}|{os.geteuid()}|{self.home}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def credentials(self) -> dict[str, str]:
        return dict(self._environ)

    # ------------------------------------------------------------ create

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            directory = self._directory(spec.lease_id)
            if not seccomp.supported() or first.program() is None:
                raise UnsupportedError(
                    f"the local provider does not know this machine's architecture ({os.uname().machine})",
                    provider="local",
                    feature="architecture",
                    alternative="the docker provider",
                )
            if spec.isolation is not None:
                gvisor.check(spec)
                self._prerequisites.runsc  # noqa: B018 - says what to install
            client = await self._prerequisites.start()
            base_layers = await self._prerequisites.base_layers(spec)
        launch = Launch(self._prerequisites, client, directory, spec, base_layers)
        if not launch.reserve():
            return await self.get(spec.lease_id)
        try:
            room = await self._rooms.take(launch)
            inner = launch.move_in(room) if room is not None else None
            if inner is None:
                room = None
                launch.furnish()
                inner = await launch.run()
            self._know(launch, inner, room)
            if launch.key is not None and inner.start_time:
                try:
                    await self._gvisor_calls.wait_ready(directory.sandbox_id)
                except SandboxGone:
                    inner = ProcessMark(inner.pid, 0)  # its main command has ended already
            if spec.network is not None and spec.network.proxied and inner.start_time:
                from lowtide.providers.local import network

                denied = self._denied.prepare(directory.sandbox_id)
                inside = self._entrance.inside(directory.sandbox_id)
                await network.connect(directory, inner, spec.network, denied, inside)
        except BaseException:
            self._entrance.forget(directory.sandbox_id)
            await asyncio.shield(
                asyncio.get_running_loop().run_in_executor(None, self._destroy, directory, 0.0)
            )
            raise
        info = launch.info() if inner.start_time else directory.info()
        if info is None or not directory.exists():
            raise gone(directory.sandbox_id, "the sandbox was ended while it was made")
        asyncio.get_running_loop().call_later(_AFTER_CREATE_SECONDS, self._prepare, client)
        return info

    def _know(self, launch: Launch, inner: ProcessMark, room: Room | None) -> None:
        known = Known(
            inner=inner,
            environment=launch.environment,
            working_dir=launch.working_dir,
            pids=launch.spec.limits.pids,
            network=launch.network,
            groups=[str(group.path) for group in launch.groups],
            command_starter=room.command_starter if room is not None else None,
            key=launch.key,
        )
        self._entrance.add(launch.directory.sandbox_id, known)

    def _prepare(self, client: SpawnerClient | None) -> None:
        """Have something ready for the next create."""
        if client is None or client is not self._prerequisites.client or not client.running:
            return
        if not self._rooms.prepare():
            preparing = asyncio.ensure_future(client.prepare())
            preparing.add_done_callback(lambda done: done.cancelled() or done.exception())

    # ------------------------------------------------------------ find, list, destroy

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        directory = self._directory(spec.lease_id)
        info = directory.info()
        if info is None and directory.exists():
            # Its maker died between the directory and what is written in it.
            info = SandboxInfo(sandbox_id=spec.lease_id, state=SandboxState.PENDING)
        return info

    async def get(self, sandbox_id: str) -> SandboxInfo:
        info = self._directory(sandbox_id).info()
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
        for directory in sandbox_directories(self.home / "sandboxes"):
            info = directory.info()
            if info is not None and wanted <= info.labels.items():
                yield info

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        if not valid_id(sandbox_id):
            return False  # nothing can have this id
        directory = self._directory(sandbox_id)
        grace_seconds = await self._grace_left(directory, grace_seconds)
        inner = self._entrance.forget(sandbox_id)
        self.forget_calls(sandbox_id)
        ended = await destroy.destroy_on_loop(directory, self.home / "trash", grace_seconds)
        if not ended and inner is not None and inner.alive():
            # Somebody has removed its directory and not the sandbox.
            await asyncio.to_thread(destroy.kill, None, inner, sandbox_id)
            ended = True
        self._denied.settle(sandbox_id)
        asyncio.get_running_loop().call_later(_AFTER_END_SECONDS, self._prepare, self._prerequisites.client)
        return ended

    async def denied_connections(self, sandbox_id: str) -> builtins.list[DeniedConnection]:
        """What its network setting refused, oldest first; also after its end, for a week."""
        return self._denied.read(sandbox_id) if valid_id(sandbox_id) else []

    async def _grace_left(self, directory: SandboxDirectory, grace_seconds: float) -> float:
        """What is not used up yet: gVisor's processes are not the ones to be asked, so those inside were."""
        if grace_seconds > 0 and (directory.spec() or {}).get("isolation"):
            await self._gvisor_calls.ask_to_end(directory.sandbox_id, grace_seconds)
            return 0.0
        return grace_seconds

    def _destroy(self, directory: SandboxDirectory, grace_seconds: float) -> bool:
        return destroy.destroy(directory, self.home / "trash", grace_seconds)

    def logs(self, sandbox_id: str, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
        return logs.read(self._directory(sandbox_id), follow=follow, tail_lines=tail_lines)

    # ------------------------------------------------------------ pause, snapshots

    async def pause(self, sandbox_id: str) -> None:
        await self._pause_or_resume(sandbox_id, pause.pause, "pause")

    async def resume(self, sandbox_id: str) -> None:
        await self._pause_or_resume(sandbox_id, pause.resume, "resume")

    async def _pause_or_resume(
        self, sandbox_id: str, work: Callable[[SandboxDirectory, ProcessMark], None], word: str
    ) -> None:
        known = self._entrance.known(sandbox_id)
        if known.key is None:
            await asyncio.to_thread(self._while_alive, work, sandbox_id, known.inner)
        else:
            await self._gvisor_calls.pause(sandbox_id, self._directory(sandbox_id), word)

    def _while_alive(
        self, work: Callable[[SandboxDirectory, ProcessMark], None], sandbox_id: str, inner: ProcessMark
    ) -> None:
        try:
            if inner.alive():
                return work(self._directory(sandbox_id), inner)
        except FileNotFoundError:
            pass  # destroyed meanwhile
        raise gone(sandbox_id)

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        directory = self._directory(sandbox_id)
        spec = directory.spec()
        if spec is None:
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id}", provider="local", sandbox_id=sandbox_id
            )
        return await asyncio.to_thread(self.snapshots.take, directory, spec, name, _upper(directory, spec))

    async def snapshot_and_destroy(self, sandbox_id: str, name: str, *, grace_seconds: float = 0.0) -> str:
        """The same as both calls, without the copy: the layers change their owner."""
        directory = self._directory(sandbox_id)
        spec = directory.spec()
        if spec is None:
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id}", provider="local", sandbox_id=sandbox_id
            )
        if spec["disk"]:
            taken = await self.snapshot(sandbox_id, name)
        else:
            grace_seconds = await self._grace_left(directory, grace_seconds)
            taken = await asyncio.to_thread(self._stop_and_take, directory, spec, name, grace_seconds)
        await self.destroy(sandbox_id)
        return taken

    def _stop_and_take(
        self, directory: SandboxDirectory, spec: dict[str, Any], name: str, grace_seconds: float
    ) -> str:
        destroy.stop(directory, grace_seconds)
        return self.snapshots.take(directory, spec, name, str(directory.path), move=True)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return await asyncio.to_thread(self.snapshots.delete, snapshot_id, self.home / "sandboxes")

    async def list_snapshots(self) -> Sequence[str]:
        return await asyncio.to_thread(self.snapshots.names)

    async def aclose(self) -> None:
        self.end_calls()
        await self._rooms.aclose()
        self._prerequisites.close()
        self._entrance.close()
        await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        """What killed processes have left of rooms, of snapshots and of sandboxes they were destroying."""
        rooms_on_disk.sweep(self.home)
        self.snapshots.sweep()
        destroy.sweep_trash(self.home / "trash")
        destroy.wait_removed()
        if not any(sandbox_directories(self.home / "sandboxes")):
            bound_groups.release(bound_groups.left_over(self.home), _RELEASE_SECONDS)

    def _directory(self, sandbox_id: str) -> SandboxDirectory:
        if not valid_id(sandbox_id):
            raise SandboxNotFoundError(
                f"there is no sandbox {sandbox_id!r}", provider="local", sandbox_id=sandbox_id
            )
        return SandboxDirectory(self.home / "sandboxes" / sandbox_id)


def _upper(directory: SandboxDirectory, spec: Mapping[str, Any]) -> str:
    """Where its upper layers can be read: a disk of its own is mounted only where its processes are."""
    outer, _ = directory.processes()
    if not spec["disk"]:
        return str(directory.path)
    if outer is None or not outer.alive():
        raise gone(directory.sandbox_id, "the sandbox has ended, and the disk of a fixed size with it")
    return f"/proc/{outer.pid}/root{spec['disk']}"


def home_of(environ: Mapping[str, str]) -> Path:
    """The state directory, as the lifecycle computes it."""
    return machine.state_directory(environ)


def _machine_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return os.uname().nodename
