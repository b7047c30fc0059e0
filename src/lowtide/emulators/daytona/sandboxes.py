"""All sandboxes of the emulator: making, changing and ending them. Every change happens under its lock."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Any

from lowtide.emulators.build import BuildFailed
from lowtide.emulators.daytona import drafting, intervals
from lowtide.emulators.daytona.answers import Refused, not_found, whole_of
from lowtide.emulators.daytona.changes import Changes, Tell
from lowtide.emulators.daytona.drafting import either
from lowtide.emulators.daytona.machine import Machine
from lowtide.emulators.daytona.sandbox import SETTLED, Sandbox, SandboxState
from lowtide.emulators.dockerfile import CannotBuild
from lowtide.emulators.guest import users_are_real
from lowtide.errors import LowtideError, ResourceExhaustedError
from lowtide.providers.optional import Pauses

if TYPE_CHECKING:
    from lowtide.emulators.daytona.snapshots import Snapshots
    from lowtide.emulators.daytona.volumes import Volumes
    from lowtide.emulators.ground import Ground

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@ -]{0,254}")
_BUILDER_SECONDS = 0.1  # until a builder takes it: the answer to the create says that it waits
_REMEMBERED = 1000
_TRIES, _PAUSE_SECONDS = 20, 0.5


class Sandboxes(Changes):
    def __init__(
        self, ground: Ground, organization_id: str, snapshots: Snapshots, volumes: Volumes, tell: Tell
    ) -> None:
        super().__init__(ground, tell)
        self.organization_id = organization_id
        self.machine = Machine(ground)
        self.table: dict[str, Sandbox] = {}
        self.ended: dict[str, tuple[float, Sandbox]] = {}  # for lists that lag
        self._names: dict[str, str] = {}
        self._snapshots = snapshots
        self._volumes = volumes
        ground.backing.ended_itself.append(self._machine_ended)

    def get(self, name: str) -> Sandbox:
        """By id or by name. Refused with 404."""
        found = self.table.get(name) or self.table.get(self._names.get(name, ""))
        if found is None:
            raise not_found(name)
        return found

    def running(self, name: str) -> Sandbox:
        """For traffic into it."""
        sandbox = self.get(name)
        if sandbox.state is not SandboxState.STARTED:
            raise Refused(400, f"Sandbox is not started: its state is {sandbox.state}")
        return sandbox

    # ------------------------------------------------------------ making

    async def create(
        self, asked: dict[str, Any], *, slow_start: float | None = None, broken: str | None = None
    ) -> Sandbox:
        """From the body of a create call. Answered when it runs, or at once when it must be built first.

        `broken`: why it never becomes usable.
        """
        sandbox = drafting.draft(
            asked,
            now=round(self.ground.clock.now(), 3),
            organization_id=self.organization_id,
            snapshots=self._snapshots,
            volumes=self._volumes,
            known=self.get,
        )
        sandbox.name = self._free_name(asked.get("name"), sandbox.sandbox_id)
        sandbox.error_reason = broken
        if self.ground.backing.count >= self.ground.backing.limit:
            raise Refused(403, f"Total sandbox limit exceeded. Maximum allowed: {self.ground.backing.limit}.")
        self._enter(sandbox)
        if sandbox.build is not None:
            sandbox.state = SandboxState.PENDING_BUILD
            self._begin(self._build(sandbox, slow_start or 0.0))
        elif slow_start is not None:
            self._begin(self._boot(sandbox, slow_start))
        else:
            await self._boot(sandbox, 0.0)
            if sandbox.state is SandboxState.ERROR and sandbox.sandbox_id not in self.table:
                raise Refused(403, sandbox.error_reason or "Total sandbox limit exceeded")
        return sandbox

    def _free_name(self, name: Any, otherwise: str) -> str:
        if name is None or name == "":
            return otherwise
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Refused(400, "Sandbox name is not valid")
        if name in self._names:
            raise Refused(409, f"Sandbox with name {name} already exists")
        return name

    def _enter(self, sandbox: Sandbox) -> None:
        self.table[sandbox.sandbox_id] = sandbox
        self._names[sandbox.name] = sandbox.sandbox_id
        self._arm(sandbox)

    async def _build(self, sandbox: Sandbox, wait: float) -> None:
        assert sandbox.build is not None
        await asyncio.sleep(_BUILDER_SECONDS)
        await self._set(sandbox, SandboxState.BUILDING_SNAPSHOT)
        try:
            sandbox.built = await self._snapshots.built(sandbox.build, sandbox.build_log)
        except (BuildFailed, CannotBuild, LowtideError) as error:
            sandbox.build_log.append(f"ERROR: {error}\n")
            if sandbox.state is SandboxState.BUILDING_SNAPSHOT:
                sandbox.error_reason = f"Build failed: {error}"
                await self._set(sandbox, SandboxState.BUILD_FAILED)
            return
        if sandbox.sandbox_id not in self.table:  # deleted meanwhile
            self.ground.builder.release(sandbox.built)
            return
        sandbox.base, sandbox.workdir = sandbox.built.snapshot, sandbox.built.around.workdir
        sandbox.environment = {**sandbox.built.around.environment, **sandbox.environment}
        await self._boot(sandbox, wait)

    async def _boot(self, sandbox: Sandbox, wait: float) -> None:
        async with sandbox.lock:
            if wait:
                await asyncio.sleep(wait)
            if sandbox.sandbox_id not in self.table:
                return
            try:
                sandbox.backing_id = await self.machine.boot(sandbox.base, sandbox.network)
                await self._volumes.fill(self, sandbox)
            except LowtideError as error:
                sandbox.error_reason = str(error)
                if isinstance(error, ResourceExhaustedError):
                    self._forget(sandbox)
                await self._set(sandbox, SandboxState.ERROR)
                return
            sandbox.last_activity_at = self.ground.clock.now()
            if sandbox.state is not SandboxState.DESTROYING:  # its life may have ended meanwhile
                usable = sandbox.error_reason is None
                await self._set(sandbox, SandboxState.STARTED if usable else SandboxState.ERROR)

    async def fork(self, source: Sandbox, name: Any) -> Sandbox:
        """A copy of its files with an id of its own. It runs when this returns."""
        self._settled(source, SandboxState.STARTED, SandboxState.STOPPED)
        made = drafting.copy(source, round(self.ground.clock.now(), 3))
        made.name = self._free_name(name, made.sandbox_id)
        before = source.state
        async with source.lock:
            await self._set(source, SandboxState.FORKING)
            try:
                copied = await self._copy(source)
            finally:
                await self._set(source, before)
        made.base, made.layers = copied, []
        self._enter(made)
        await self._boot(made, 0.0)
        return made

    async def _copy(self, sandbox: Sandbox) -> str | None:
        if sandbox.backing_id is None:
            return sandbox.layers[-1] if sandbox.layers else sandbox.base
        return await self.ground.backing.snapshot(sandbox.backing_id)

    # ------------------------------------------------------------ changing

    async def start(self, sandbox: Sandbox) -> None:
        self._settled(sandbox, SandboxState.STOPPED, SandboxState.ARCHIVED, SandboxState.PAUSED)
        via = {
            SandboxState.STOPPED: SandboxState.STARTING,
            SandboxState.ARCHIVED: SandboxState.RESTORING,
            SandboxState.PAUSED: SandboxState.RESUMING,
        }[sandbox.state]
        sandbox.desired = "started"

        async def work() -> None:
            if via is SandboxState.RESUMING:
                await self._freeze(sandbox, "CONT")
            else:
                sandbox.cut = asyncio.Event()
                sandbox.backing_id = await self.machine.boot(
                    sandbox.layers[-1] if sandbox.layers else sandbox.base, sandbox.network
                )
                await self._volumes.fill(self, sandbox)
            sandbox.last_activity_at = self.ground.clock.now()

        await self._through(sandbox, via, SandboxState.STARTED, work)

    async def recover(self, sandbox: Sandbox) -> None:
        self._settled(sandbox, SandboxState.ERROR)
        if not sandbox.recoverable:
            raise Refused(400, "Sandbox is not recoverable")
        sandbox.error_reason, sandbox.recoverable = None, False
        if sandbox.backing_id is not None:
            await self._set(sandbox, SandboxState.STARTED)
            return
        sandbox.state = SandboxState.STOPPED
        await self.start(sandbox)

    async def stop(self, sandbox: Sandbox, *, at: float | None = None) -> asyncio.Task[None]:
        """Its files stay, its processes end. With auto-delete 0 it goes altogether."""
        self._settled(sandbox, SandboxState.STARTED, SandboxState.PAUSED)
        thawed = sandbox.state is SandboxState.PAUSED
        sandbox.desired = "stopped"

        async def work() -> None:
            if thawed:
                await self._freeze(sandbox, "CONT")
            await self._volumes.save(self, sandbox)
            await self.let_go(sandbox)
            backing, sandbox.backing_id = sandbox.backing, None
            sandbox.layers.append(await self.ground.backing.stop(backing))
            sandbox.stopped_at = self.ground.clock.now() if at is None else at

        return await self._through(sandbox, SandboxState.STOPPING, SandboxState.STOPPED, work)

    async def pause(self, sandbox: Sandbox) -> asyncio.Task[None]:
        self._settled(sandbox, SandboxState.STARTED)
        sandbox.desired = "paused"
        return await self._through(
            sandbox, SandboxState.PAUSING, SandboxState.PAUSED, lambda: self._freeze(sandbox, "STOP")
        )

    async def archive(self, sandbox: Sandbox) -> asyncio.Task[None]:
        self._settled(sandbox, SandboxState.STOPPED)
        sandbox.desired = "archived"

        async def work() -> None:
            return None

        return await self._through(sandbox, SandboxState.ARCHIVING, SandboxState.ARCHIVED, work)

    async def resize(self, sandbox: Sandbox, asked: dict[str, Any]) -> None:
        self._settled(sandbox, SandboxState.STARTED, SandboxState.STOPPED)
        cpu = either(whole_of(asked.get("cpu"), "cpu", lowest=1), sandbox.cpu)
        memory = either(whole_of(asked.get("memory"), "memory", lowest=1), sandbox.memory)
        disk = either(whole_of(asked.get("disk"), "disk", lowest=1), sandbox.disk)
        if disk < sandbox.disk:
            raise Refused(400, "Disk size cannot be decreased")
        if sandbox.state is SandboxState.STARTED:
            if disk != sandbox.disk:
                raise Refused(400, "Sandbox must be stopped to resize its disk")
            if cpu < sandbox.cpu or memory < sandbox.memory:
                raise Refused(400, "CPU and memory of a started sandbox can only be increased")

        async def work() -> None:
            sandbox.cpu, sandbox.memory, sandbox.disk = cpu, memory, disk

        await self._through(sandbox, SandboxState.RESIZING, sandbox.state, work)

    async def snapshot(self, sandbox: Sandbox, name: str) -> None:
        """Under a name of the catalogue, from which others can be created."""
        self._settled(sandbox, SandboxState.STARTED, SandboxState.STOPPED)
        self._snapshots.free_name(name)

        async def work() -> None:
            self._snapshots.keep(name, await self._copy(sandbox), sandbox)

        await self._through(sandbox, SandboxState.SNAPSHOTTING, sandbox.state, work)

    def touch(self, sandbox: Sandbox) -> None:
        """Somebody did something with it."""
        sandbox.last_activity_at = self.ground.clock.now()

    def rearm(self, sandbox: Sandbox) -> None:
        """An interval has changed."""
        sandbox.updated_at = self.ground.clock.now()
        self._arm(sandbox)

    # ------------------------------------------------------------ ending

    async def destroy(self, sandbox: Sandbox, *, force: bool = False) -> asyncio.Task[None]:
        """Its name is free at once. 409 while something else happens to it."""
        if sandbox.state not in SETTLED and not force:
            raise Refused(409, "Sandbox state change in progress")
        if any(one.parent_id == sandbox.sandbox_id for one in self.table.values()) and not force:
            raise Refused(400, "Sandbox has forks that are not destroyed: destroy them first")
        before, sandbox.state, sandbox.desired = sandbox.state, SandboxState.DESTROYING, "destroyed"
        self._names.pop(sandbox.name, None)
        self.ended[sandbox.sandbox_id] = (self.ground.clock.now(), sandbox)
        while len(self.ended) > _REMEMBERED:
            self.ended.pop(next(iter(self.ended)))
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.cut.set()
        await self._tell(sandbox, before, SandboxState.DESTROYING)
        return self._begin(self._destroy(sandbox, frozen=before is SandboxState.PAUSED))

    async def _destroy(self, sandbox: Sandbox, *, frozen: bool) -> None:
        async with sandbox.lock:
            backing = self.ground.backing
            if sandbox.backing_id is not None:
                if frozen:  # what is asked of it on the way out needs its processes
                    await self._freeze(sandbox, "CONT")
                await self._volumes.save(self, sandbox)
                await self.let_go(sandbox)
                if not await self._end_backing(sandbox):
                    return
            for layer in reversed(sandbox.layers):
                with contextlib.suppress(LowtideError):  # below a snapshot or fork: goes with the emulator
                    await backing.delete_snapshot(layer)
            self._forget(sandbox)
            sandbox.state = SandboxState.DESTROYED
            await self._tell(sandbox, SandboxState.DESTROYING, SandboxState.DESTROYED)

    def _machine_ended(self, backing_id: str) -> None:
        async def fail(sandbox: Sandbox) -> None:
            async with sandbox.lock:
                if sandbox.state is SandboxState.STARTED and sandbox.backing_id == backing_id:
                    await self.let_go(sandbox)
                    sandbox.error_reason = "the sandbox's machine has ended"
                    await self._set(sandbox, SandboxState.ERROR)

        for sandbox in self.table.values():
            if sandbox.backing_id == backing_id:
                sandbox.cut.set()  # the request that found out is the first to hear of it
                self._begin(fail(sandbox))

    async def _end_backing(self, sandbox: Sandbox) -> bool:
        """A machine with too much to do may need more than one try; what stays can be deleted again."""
        assert sandbox.backing_id is not None
        for _ in range(_TRIES):
            try:
                await self.ground.backing.destroy(sandbox.backing_id)
            except LowtideError as error:
                sandbox.error_reason = str(error)
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                sandbox.backing_id, sandbox.error_reason = None, None
                return True
        await self._set(sandbox, SandboxState.ERROR)
        return False

    def _forget(self, sandbox: Sandbox) -> None:
        self.table.pop(sandbox.sandbox_id, None)
        if self._names.get(sandbox.name) == sandbox.sandbox_id:
            del self._names[sandbox.name]
        if sandbox.built is not None:
            self.ground.builder.release(sandbox.built)
            sandbox.built = None
        if sandbox.timer is not None:
            sandbox.timer.cancel()

    async def let_go(self, sandbox: Sandbox) -> None:
        """Close what is open into the machine."""
        sandbox.cut.set()
        closing, sandbox.closing = sandbox.closing, []
        sandbox.rooms.clear()
        agent, sandbox.agent = sandbox.agent, None
        waiting = [close() for close in closing] + ([agent.aclose()] if agent is not None else [])
        await asyncio.gather(*waiting, return_exceptions=True)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self.let_go(sandbox) for sandbox in list(self.table.values())))

    # ------------------------------------------------------------ the parts

    def _arm(self, sandbox: Sandbox) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
            sandbox.timer = None
        due = intervals.next_due(sandbox)
        if due is not None and sandbox.sandbox_id in self.table:
            sandbox.timer = self.ground.clock.at(due.at, lambda: self._expire(sandbox))

    async def _expire(self, sandbox: Sandbox) -> None:
        if self.table.get(sandbox.sandbox_id) is not sandbox:
            return
        due = intervals.next_due(sandbox)
        if due is None or due.at > self.ground.clock.now():
            self._arm(sandbox)
            return
        with contextlib.suppress(Refused):
            if due.action is intervals.Action.DESTROY:
                await (await self.destroy(sandbox, force=True))
            elif due.action is intervals.Action.STOP:
                await (await self.stop(sandbox, at=due.at))
            elif due.action is intervals.Action.PAUSE:
                await (await self.pause(sandbox))
            else:
                await (await self.archive(sandbox))

    async def _freeze(self, sandbox: Sandbox, signal: str) -> None:
        provider: object = self.ground.backing.provider
        if isinstance(provider, Pauses):
            await (provider.pause if signal == "STOP" else provider.resume)(sandbox.backing)
            return
        for user in ("1000:1000", "0:0") if users_are_real() else (None,):
            await self.ground.backing.run(sandbox.backing, ("/bin/sh", "-c", f"kill -{signal} -1"), user=user)
