"""The emulated devboxes: what exists, how it boots, how long it lives, suspending and resuming, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from lowtide.emulators.agent.client import Agent, AgentError
from lowtide.emulators.fields import TEXT, check_fields
from lowtide.emulators.guest import UNTIL_SETTLED, first_process, users_are_real
from lowtide.emulators.runloop.executions import Execution
from lowtide.emulators.runloop.launch import launch_parameters, new_tunnel
from lowtide.emulators.runloop.model import OVER, Devbox, Refused, Status, milliseconds, new_id
from lowtide.emulators.runloop.snapshots import Snapshots
from lowtide.errors import LowtideError
from lowtide.providers.base import ProcessHandle

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground
    from lowtide.emulators.runloop.account import Account
    from lowtide.emulators.runloop.blueprints import Blueprint, Blueprints
    from lowtide.emulators.runloop.model import Snapshot

HOMES = {"user": "/home/user", "root": "/root"}
_REMEMBERED = 5000  # that are over


def _base(snapshot: Snapshot | None, blueprint: Blueprint | None) -> str | None:
    """The files it stands on; None: this machine's own."""
    if snapshot is not None:
        return snapshot.backing_id
    return blueprint.built.snapshot if blueprint is not None and blueprint.built is not None else None


class Devboxes:
    """All devboxes of the emulator, ended ones too. Every change of one happens under its own lock."""

    def __init__(self, ground: Ground, blueprints: Blueprints, account: Account) -> None:
        self.ground = ground
        self.blueprints = blueprints
        self.account = account
        self.table: dict[str, Devbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.snapshots = Snapshots(ground, self._begin, self._drop_disk)
        ground.backing.ended_itself.append(self._machine_ended)

    def get(self, devbox_id: str) -> Devbox:
        try:
            return self.table[devbox_id]
        except KeyError:
            raise Refused(404, f"Devbox {devbox_id} not found") from None

    def running(self, devbox_id: str) -> Devbox:
        """For what happens inside. It counts as activity."""
        devbox = self.get(devbox_id)
        if devbox.status is not Status.RUNNING:
            raise Refused(400, f"Devbox {devbox_id} is not running: its status is {devbox.status}")
        self.touch(devbox)
        return devbox

    # ------------------------------------------------------------ making

    def create(self, asked: dict[str, Any], *, slow: float = 0.0, broken: bool = False) -> Devbox:
        """From the body of a create call. Answered at once; it boots by itself."""
        launch = launch_parameters(asked)
        blueprint = self.blueprints.usable(asked.get("blueprint_id"), asked.get("blueprint_name"))
        snapshot = None
        if asked.get("snapshot_id"):
            snapshot = self.snapshots.get(asked["snapshot_id"])
            if snapshot.status != "complete":
                raise Refused(400, f"snapshot {snapshot.snapshot_id} is {snapshot.status}")
        self.account.ways_out(launch.get("network_policy_id"))
        self._check_limit()
        now = round(self.ground.clock.now(), 3)
        devbox = Devbox(
            devbox_id=(made := new_id("dbx")),
            name=asked.get("name") or made,
            metadata=dict(asked.get("metadata") or {}),
            environment={
                **(blueprint.environment if blueprint else {}),
                **(asked.get("environment_variables") or {}),
            },
            launch=launch,
            created_at=now,
            blueprint_id=blueprint.blueprint_id if blueprint else None,
            snapshot_id=snapshot.snapshot_id if snapshot else None,
            base=_base(snapshot, blueprint),
            file_mounts=dict(asked.get("file_mounts") or {}),
            entrypoint=asked.get("entrypoint"),
            active_at=now,
        )
        for variable, secret in (asked.get("secrets") or {}).items():
            devbox.environment[variable] = self.account.secret_value(secret)
        for mount in asked.get("mounts") or ():
            if mount.get("type") == "object_mount":
                check_fields(
                    mount, {"object_id": TEXT, "object_path": TEXT}, required=("object_id", "object_path")
                )
                self.account.object_content(mount["object_id"])
                devbox.object_mounts[mount["object_path"]] = mount["object_id"]
        if asked.get("tunnel") is not None:
            devbox.tunnel = new_tunnel(asked["tunnel"], now)
        self._note(devbox)
        self.table[devbox.devbox_id] = devbox
        self._forget_old()
        self._begin(self._boot(devbox, slow, broken))
        return devbox

    def _check_limit(self) -> None:
        if self.ground.backing.count >= self.ground.backing.limit:
            raise Refused(429, f"devbox limit reached: {self.ground.backing.limit}")

    def _ways_out(self, devbox: Devbox) -> tuple[str, ...] | None:
        return self.account.ways_out(devbox.launch.get("network_policy_id"))

    async def _boot(self, devbox: Devbox, slow: float, broken: bool) -> None:
        async with devbox.lock:
            try:
                if slow:
                    await asyncio.sleep(slow)
                if devbox.status in OVER:
                    return
                devbox.backing_id = await self.ground.backing.create(
                    snapshot=devbox.base, command=first_process(), allow=self._ways_out(devbox)
                )
                await self.ground.backing.run(devbox.backing_id, ("/bin/sh", "-c", UNTIL_SETTLED))
                for path, text in devbox.file_mounts.items():
                    await self.write(devbox, path, text.encode())
                for path, object_id in devbox.object_mounts.items():
                    await self.write(devbox, path, self.account.object_content(object_id))
                self._set(devbox, Status.INITIALIZING)
            except (LowtideError, AgentError, Refused) as error:
                await self._fail(devbox, str(error), "boot")
                return
        for command in devbox.launch.get("launch_commands") or ():
            if await self._launch_command(devbox, command) != 0:
                async with devbox.lock:
                    if devbox.status not in OVER:
                        await self._end(devbox, Status.FAILURE, failure="execution_failed")
                return
        async with devbox.lock:
            if devbox.status in OVER:
                return
            if broken:
                await self._end(devbox, Status.FAILURE, failure="health_check_failed")
                return
            devbox.active_at = self.ground.clock.now()
            self._set(devbox, Status.RUNNING)
            self._arm(devbox)
        if devbox.entrypoint:
            self._begin(self._run_entrypoint(devbox, devbox.entrypoint))

    async def _launch_command(self, devbox: Devbox, command: str) -> int:
        try:
            execution = Execution(devbox.devbox_id, await self.start(devbox, command))
        except (LowtideError, Refused) as error:
            self.log(devbox, "error", "launch", str(error))
            return -1
        try:
            await execution.ended_or(devbox.cut)
        finally:
            await execution.aclose()
        self.log(devbox, "info", "launch", f"{command}: exit {execution.exit_code}")
        return -1 if execution.exit_code is None else execution.exit_code

    async def _run_entrypoint(self, devbox: Devbox, command: str) -> None:
        """When the entrypoint ends, so does the devbox."""
        await self._launch_command(devbox, command)
        with contextlib.suppress(Refused):
            await self.shutdown(devbox, force=True, reason="entrypoint_exit")

    # ------------------------------------------------------------ inside

    async def start(self, devbox: Devbox, command: str, *, stdin: bool = False) -> ProcessHandle:
        """A command in a login shell of the devbox's user, in its home."""
        home = HOMES[devbox.user]
        environment = {
            "HOME": home,
            "USER": devbox.user,
            "LOGNAME": devbox.user,
            "SHELL": "/bin/bash",
            **devbox.environment,
        }
        return await self.ground.backing.start(
            devbox.backing,
            ("/bin/bash", "-lc", command),
            user=_account(devbox),
            cwd=home,
            environment=environment,
            stdin=stdin,
        )

    async def agent(self, devbox: Devbox) -> Agent:
        """The file agent of the devbox's user, started when it is first needed."""
        if devbox.agent is None or devbox.agent.ended:
            devbox.agent = await Agent.start(
                self.ground.backing, devbox.backing, user=_account(devbox), home=HOMES[devbox.user]
            )
        return devbox.agent

    async def write(self, devbox: Devbox, path: str, data: bytes) -> None:
        async def once() -> Any:
            yield data

        await (await self.agent(devbox)).write_file(path, once())

    def log(self, devbox: Devbox, level: str, source: str, message: str, **more: Any) -> None:
        moment = milliseconds(self.ground.clock.now())
        devbox.logs.append(
            {"level": level, "source": source, "timestamp_ms": moment, "message": message, **more}
        )
        del devbox.logs[:-10_000]

    # ------------------------------------------------------------ lifetime

    def touch(self, devbox: Devbox) -> None:
        devbox.active_at = self.ground.clock.now()
        if devbox.idle is not None:
            self._arm(devbox)

    def keep_alive(self, devbox: Devbox) -> None:
        if devbox.status in OVER:
            raise Refused(400, f"Devbox {devbox.devbox_id} is {devbox.status}")
        devbox.active_at = self.ground.clock.now()
        self._arm(devbox)

    def _arm(self, devbox: Devbox) -> None:
        if devbox.timer is not None:
            devbox.timer.cancel()
        if devbox.status is not Status.RUNNING:
            return
        idle = devbox.idle
        seconds = idle["idle_time_seconds"] if idle else devbox.launch["keep_alive_time_seconds"]
        devbox.timer = self.ground.clock.at(devbox.active_at + seconds, lambda: self._expire(devbox))

    async def _expire(self, devbox: Devbox) -> None:
        idle = devbox.idle
        with contextlib.suppress(Refused):
            if idle is None:
                await self.shutdown(devbox, force=True, reason="keep_alive_timeout")
            elif idle.get("on_idle") == "suspend":
                await self.suspend(devbox)
            else:
                await self.shutdown(devbox, force=True, reason="idle")

    async def wait(self, devbox: Devbox, statuses: Collection[str], seconds: float) -> bool:
        """Whether it got into one of these within the time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while devbox.status not in statuses:
            left = until - loop.time()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await devbox.changed.wait()
        return True

    async def suspend(self, devbox: Devbox) -> None:
        if devbox.status is not Status.RUNNING:
            raise Refused(
                400, f"Devbox {devbox.devbox_id} is {devbox.status}; only a running one can be suspended"
            )
        self._set(devbox, Status.SUSPENDING)

        async def work() -> None:
            async with devbox.lock:
                if devbox.status is not Status.SUSPENDING:
                    return
                async with self._or_failure(devbox):
                    await self._let_go(devbox)
                    devbox.disk = await self.ground.backing.stop(devbox.backing)
                    devbox.backing_id = None
                    self._set(devbox, Status.SUSPENDED)

        self._begin(work())

    async def resume(self, devbox: Devbox) -> None:
        if devbox.status is not Status.SUSPENDED:
            raise Refused(
                400, f"Devbox {devbox.devbox_id} is {devbox.status}; only a suspended one can be resumed"
            )
        self._check_limit()
        self._set(devbox, Status.PROVISIONING)

        async def work() -> None:
            async with devbox.lock:
                if devbox.status is not Status.PROVISIONING:
                    return
                async with self._or_failure(devbox):
                    devbox.backing_id = await self.ground.backing.create(
                        snapshot=devbox.disk, command=first_process(), allow=self._ways_out(devbox)
                    )
                    devbox.cut = asyncio.Event()
                    devbox.active_at = self.ground.clock.now()
                    self._set(devbox, Status.RUNNING)
                    self._arm(devbox)

        self._begin(work())

    @contextlib.asynccontextmanager
    async def _or_failure(self, devbox: Devbox) -> AsyncIterator[None]:
        """What cannot be done leaves it in a state that says so: whoever waits for another hears of it."""
        try:
            yield
        except (LowtideError, Refused) as error:
            await self._fail(devbox, str(error))

    async def _fail(self, devbox: Devbox, why: str, source: str = "lifecycle") -> None:
        self.log(devbox, "error", source, why)
        await self._end(devbox, Status.FAILURE, failure="execution_failed")

    async def shutdown(self, devbox: Devbox, *, force: bool, reason: str = "api_shutdown") -> None:
        """For good. What is over stays so, and says so."""
        if devbox.status in OVER:
            return
        if devbox.snapshotting and not force:
            raise Refused(409, "a snapshot of this devbox is in progress; wait for it, or say force")
        devbox.cut.set()
        async with devbox.lock:
            if devbox.status not in OVER:
                await self._end(devbox, Status.SHUTDOWN, reason=reason)

    def _machine_ended(self, backing_id: str) -> None:
        for devbox in self.table.values():
            if devbox.backing_id == backing_id and devbox.status is Status.RUNNING:
                self._set(devbox, Status.FAILURE)  # before whoever reads an execution hears that it is over
                self._begin(self._fail(devbox, "the devbox's machine has ended"))

    async def _end(
        self, devbox: Devbox, status: Status, *, reason: str | None = None, failure: str | None = None
    ) -> None:
        if devbox.timer is not None:
            devbox.timer.cancel()
        devbox.ended_at = self.ground.clock.now()
        devbox.shutdown_reason, devbox.failure_reason = reason, failure
        await self._let_go(devbox)
        if devbox.backing_id is not None:
            await self.ground.backing.destroy(devbox.backing_id)
            devbox.backing_id = None
        disk, devbox.disk = devbox.disk, None
        if disk is not None:
            await self._drop_disk(disk)
        if devbox.status is not status:
            self._set(devbox, status)

    async def _drop_disk(self, disk: str) -> None:
        """A snapshot of a suspended devbox is that devbox's disk: the last of them takes it along."""
        held = [one.disk for one in self.table.values()]
        held += [one.backing_id for one in self.snapshots.table.values() if one.status != "deleted"]
        if disk not in held:
            with contextlib.suppress(LowtideError):  # a devbox stands on it: it goes with the emulator
                await self.ground.backing.delete_snapshot(disk)

    async def _let_go(self, devbox: Devbox) -> None:
        devbox.cut.set()
        closing: list[Coroutine[Any, Any, None]] = [one.aclose() for one in devbox.executions.values()]
        if devbox.agent is not None:
            closing.append(devbox.agent.aclose())
            devbox.agent = None
        await asyncio.gather(*closing, return_exceptions=True)

    # ------------------------------------------------------------ the rest

    def _set(self, devbox: Devbox, status: Status) -> None:
        devbox.status = status
        self._note(devbox)
        devbox.changed.set()
        devbox.changed = asyncio.Event()

    def _note(self, devbox: Devbox) -> None:
        moment = milliseconds(self.ground.clock.now())
        devbox.transitions.append({"status": str(devbox.status), "transition_time_ms": moment})

    def _forget_old(self) -> None:
        over = [one.devbox_id for one in self.table.values() if one.status in OVER]
        for name in over[: max(0, len(over) - _REMEMBERED)]:
            del self.table[name]

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def quietly() -> None:
            with contextlib.suppress(LowtideError, Refused):  # it ended meanwhile
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._let_go(devbox) for devbox in self.table.values()))


def _account(devbox: Devbox) -> str | None:
    return "user" if devbox.user == "user" and users_are_real() else None
