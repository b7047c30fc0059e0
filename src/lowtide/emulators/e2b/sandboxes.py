"""The emulated sandboxes: what exists, how long it lives, pausing, resuming, snapshots and forks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from lowtide.emulators.backing import allowed
from lowtide.emulators.e2b import interpreter
from lowtide.emulators.e2b.model import (
    DEFAULT_TIMEOUT_SECONDS,
    TEMPLATES,
    BadRequest,
    Conflict,
    Lifecycle,
    NotFound,
    Sandbox,
    Snapshot,
    checked_timeout,
    new_id,
    strings,
)
from lowtide.emulators.e2b.templates import Templates
from lowtide.emulators.e2b.users import Users
from lowtide.emulators.guest import first_process, users_are_real
from lowtide.errors import LowtideError
from lowtide.providers.optional import Pauses

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground


class Sandboxes(Users):
    """All sandboxes of the emulator. Every change of one happens under its own lock."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.table: dict[str, Sandbox] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.templates = Templates(ground)
        self._commands: set[asyncio.Task[None]] = set()
        self.ended: dict[str, tuple[float, Sandbox]] = {}  # for lists that lag
        ground.backing.ended_itself.append(self._machine_ended)

    def get(self, sandbox_id: str) -> Sandbox:
        try:
            return self.table[sandbox_id]
        except KeyError:
            raise NotFound(f"sandbox {sandbox_id!r} not found") from None

    # ------------------------------------------------------------ making

    async def create(self, asked: dict[str, Any]) -> Sandbox:
        """From the body of a create call."""
        template = asked.get("templateID")
        if not isinstance(template, str) or not template:
            raise BadRequest("templateID is required")
        snapshot = self._snapshot(template)
        alias = template.partition(":")[0]
        made_of = self.templates.find(template) if snapshot is None else None
        if made_of is not None and made_of.built is None:
            raise NotFound(f"template '{template}' has no build that is ready")
        if snapshot is None and made_of is None and alias not in (*TEMPLATES, *TEMPLATES.values()):
            raise NotFound(f"template '{template}' not found")
        auto_resume = asked.get("autoResume") or {}
        keep_memory = asked.get("autoPauseMemory")
        lifecycle = Lifecycle(
            auto_pause=bool(asked.get("autoPause")),
            keep_memory=keep_memory is not False,
            auto_resume=bool(auto_resume.get("enabled") if isinstance(auto_resume, dict) else auto_resume),
        )
        network = asked.get("network") or {}
        traffic = network.get("allowPublicTraffic") is False
        environment = strings(asked.get("envVars"), "envVars")
        now = round(self.ground.clock.now(), 3)  # what people get to see and send back
        timeout = checked_timeout(asked.get("timeout"))
        metadata = strings(asked.get("metadata"), "metadata")
        backing = await self._make_backing(
            snapshot.backing_id
            if snapshot
            else (made_of.built.snapshot if made_of and made_of.built else None),
            network,
            asked.get("allow_internet_access"),
        )
        sandbox = Sandbox(
            sandbox_id=new_id("i"),
            template_id=(
                snapshot.template
                if snapshot
                else made_of.template_id
                if made_of
                else TEMPLATES.get(alias, alias)
            ),
            alias=made_of.name if made_of else None if snapshot or alias not in TEMPLATES else alias,
            backing_id=backing,
            metadata=metadata,
            environment=environment,
            started_at=now,
            end_at=now + timeout,
            timeout=timeout,
            lifecycle=lifecycle,
            network=network,
            allow_internet_access=asked.get("allow_internet_access"),
            envd_token=None if asked.get("secure") is False else "ea_" + secrets.token_hex(24),
            traffic_token="ta_" + secrets.token_hex(24) if traffic else None,
            volume_mounts=asked.get("volumeMounts") or [],
        )
        self.table[sandbox.sandbox_id] = sandbox
        self._arm(sandbox)
        self._start_interpreter(sandbox)
        if made_of is not None and made_of.start_command:
            self._start_command(sandbox, made_of.start_command)
        if sandbox.interpreter is not None:
            await sandbox.interpreter.ready()  # as on the service: it answers when create returns
        return sandbox

    def _start_interpreter(self, sandbox: Sandbox) -> None:
        """The templates of the code interpreter have it running from the start."""
        made_of = self.templates.find(sandbox.template_id)
        wanted = sandbox.template_id == TEMPLATES["code-interpreter-v1"] or (made_of and made_of.interpreter)
        if wanted and interpreter.available():
            sandbox.interpreter = interpreter.Interpreter(self.ground, self, sandbox)

    def _start_command(self, sandbox: Sandbox, command: str) -> None:
        """What the template's builder was told to start; it runs as long as the sandbox."""

        words = ("/bin/bash", "-l", "-c", f"cd ~; {command}")
        self._begin(self.ground.backing.run(sandbox.backing, words, user=self.account("user")))

    def _begin(self, work: Awaitable[Any]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(LowtideError, NotFound):  # the sandbox has ended
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _make_backing(
        self, snapshot: str | None, network: dict[str, Any], internet: bool | None
    ) -> str:
        # An allow-list is one only with everything else denied; without it the service allows all, and we what we may.
        closed = internet is False or "0.0.0.0/0" in (network.get("denyOut") or ())
        allow = allowed(network.get("allowOut") or ()) if closed else None
        return await self.ground.backing.create(snapshot=snapshot, command=first_process(), allow=allow)

    async def fork(self, sandbox_id: str, count: int, timeout: float | None) -> list[Sandbox | Exception]:
        """Copies of a running sandbox's files, each with its own id and lifetime."""
        source = self.get(sandbox_id)
        async with source.lock:
            if source.paused:
                raise Conflict("sandbox is paused")
            copied = await self.ground.backing.snapshot(source.backing)

        async def one() -> Sandbox | Exception:
            try:
                backing = await self._make_backing(copied, source.network, source.allow_internet_access)
            except LowtideError as error:
                return error
            now = self.ground.clock.now()
            lasting = checked_timeout(timeout) if timeout is not None else source.timeout
            made = Sandbox(
                sandbox_id=new_id("i"),
                template_id=source.template_id,
                alias=source.alias,
                backing_id=backing,
                metadata=dict(source.metadata),
                environment=dict(source.environment),
                started_at=now,
                end_at=now + lasting,
                timeout=lasting,
                lifecycle=source.lifecycle,
                network=dict(source.network),
                allow_internet_access=source.allow_internet_access,
                envd_token="ea_" + secrets.token_hex(24) if source.envd_token else None,
                traffic_token="ta_" + secrets.token_hex(24) if source.traffic_token else None,
            )
            self.table[made.sandbox_id] = made
            self._arm(made)
            self._start_interpreter(made)
            return made

        return list(await asyncio.gather(*(one() for _ in range(count))))

    # ------------------------------------------------------------ lifetime

    def set_timeout(self, sandbox_id: str, seconds: float) -> None:
        """From now; can shorten. A paused sandbox has none."""
        sandbox = self.get(sandbox_id)
        if sandbox.paused:
            raise NotFound(f"sandbox {sandbox_id!r} is not running")
        sandbox.timeout = seconds
        sandbox.end_at = self.ground.clock.now() + seconds
        self._arm(sandbox)

    def _arm(self, sandbox: Sandbox) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.timer = self.ground.clock.at(sandbox.end_at, lambda: self._expire(sandbox))

    async def _expire(self, sandbox: Sandbox) -> None:
        if self.table.get(sandbox.sandbox_id) is not sandbox or sandbox.paused:
            return
        if sandbox.end_at > self.ground.clock.now():
            self._arm(sandbox)
        elif sandbox.lifecycle.auto_pause:
            with contextlib.suppress(Conflict, NotFound):
                await self.pause(sandbox.sandbox_id, keep_memory=sandbox.lifecycle.keep_memory)
        else:
            with contextlib.suppress(NotFound):
                await self.kill(sandbox.sandbox_id)

    async def connect(self, sandbox_id: str, timeout: float | None, *, reboot: bool) -> tuple[Sandbox, bool]:
        """Attach, resume when paused, and extend (never shorten) the life. True when it was resumed."""
        sandbox = self.get(sandbox_id)
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        async with sandbox.lock:
            self.get(sandbox_id)
            if sandbox.paused:
                if reboot and sandbox.frozen:
                    await self._to_disk(sandbox)
                await self._resume(sandbox, seconds)
                return sandbox, True
            until = self.ground.clock.now() + seconds
            if until > sandbox.end_at:
                sandbox.timeout, sandbox.end_at = seconds, until
                self._arm(sandbox)
            return sandbox, False

    async def running(self, sandbox_id: str) -> Sandbox:
        """For traffic into it: running, or woken when it was made so. NotFound otherwise."""
        sandbox = self.get(sandbox_id)
        if sandbox.paused:
            if not (sandbox.lifecycle.auto_resume and sandbox.frozen):
                raise NotFound(f"sandbox {sandbox_id!r} is paused")
            async with sandbox.lock:
                if sandbox.paused:
                    await self._resume(sandbox, max(sandbox.timeout, DEFAULT_TIMEOUT_SECONDS))
        if sandbox.broken:
            raise NotFound(f"sandbox {sandbox_id!r} never started")
        return sandbox

    async def kill(self, sandbox_id: str) -> None:
        sandbox = self.get(sandbox_id)
        del self.table[sandbox_id]
        self.ended[sandbox_id] = (self.ground.clock.now(), sandbox)
        while len(self.ended) > 1000:
            self.ended.pop(next(iter(self.ended)))
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.cut.set()
        async with sandbox.lock:
            await self._let_go(sandbox)
            if sandbox.backing_id is not None:
                await self.ground.backing.destroy(sandbox.backing_id)
            if sandbox.paused_snapshot is not None:
                with contextlib.suppress(LowtideError):
                    await self.ground.backing.delete_snapshot(sandbox.paused_snapshot)

    def _machine_ended(self, backing_id: str) -> None:
        for sandbox in list(self.table.values()):
            if sandbox.backing_id == backing_id and not sandbox.paused:
                sandbox.cut.set()  # the request that found out is the first to hear of it
                self._begin(self.kill(sandbox.sandbox_id))

    # ------------------------------------------------------------ pausing

    async def pause(self, sandbox_id: str, *, keep_memory: bool) -> None:
        sandbox = self.get(sandbox_id)
        async with sandbox.lock:
            self.get(sandbox_id)
            if sandbox.paused:
                raise Conflict(f"sandbox {sandbox_id!r} is already paused")
            if sandbox.timer is not None:
                sandbox.timer.cancel()
            sandbox.paused = True
            sandbox.end_at = self.ground.clock.now()
            sandbox.cut.set()
            if keep_memory:
                await self._freeze(sandbox, "STOP")
                sandbox.frozen = True
            else:
                await self._to_disk(sandbox)

    async def _to_disk(self, sandbox: Sandbox) -> None:
        """Keep the files alone: what ran, ends; the next boot is a new one."""
        await self._let_go(sandbox)
        backing = sandbox.backing
        sandbox.paused_snapshot = await self.ground.backing.snapshot(backing)
        sandbox.backing_id, sandbox.frozen = None, False
        await self.ground.backing.destroy(backing)

    async def _resume(self, sandbox: Sandbox, seconds: float) -> None:
        if sandbox.frozen:
            await self._freeze(sandbox, "CONT")
        else:
            sandbox.backing_id = await self._make_backing(
                sandbox.paused_snapshot, sandbox.network, sandbox.allow_internet_access
            )
            sandbox.paused_snapshot = None  # the new sandbox stands on it
            sandbox.boot_id, sandbox.settled = str(uuid.uuid4()), False
            self._start_interpreter(sandbox)
        sandbox.paused = sandbox.frozen = False
        sandbox.cut = asyncio.Event()
        sandbox.timeout = seconds
        sandbox.end_at = self.ground.clock.now() + seconds
        self._arm(sandbox)

    async def _freeze(self, sandbox: Sandbox, signal: str) -> None:
        provider: object = self.ground.backing.provider
        if isinstance(provider, Pauses):
            await (provider.pause if signal == "STOP" else provider.resume)(sandbox.backing)
            return
        users = ["user", "root"] if users_are_real() else [None]
        for user in users:
            await self.ground.backing.run(sandbox.backing, ("/bin/sh", "-c", f"kill -{signal} -1"), user=user)

    # ------------------------------------------------------------ snapshots

    async def snapshot(self, sandbox_id: str, name: str | None) -> Snapshot:
        sandbox = self.get(sandbox_id)
        async with sandbox.lock:
            if sandbox.backing_id is None:
                raise Conflict("sandbox is paused")
            backing = await self.ground.backing.snapshot(sandbox.backing_id)
        made = Snapshot(
            snapshot_id=new_id("s") + ":default",
            backing_id=backing,
            sandbox_id=sandbox_id,
            name=name,
            template=sandbox.template_id,
            created_at=self.ground.clock.now(),
        )
        self.snapshots[made.snapshot_id] = made
        return made

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Or a template: on the service both are deleted by the same call."""
        snapshot = self._snapshot(snapshot_id)
        template = self.templates.find(snapshot_id) if snapshot is None else None
        if template is not None:
            return await self.templates.delete(template)
        if snapshot is None:
            raise NotFound(f"template '{snapshot_id}' not found")
        del self.snapshots[snapshot.snapshot_id]
        with contextlib.suppress(LowtideError):  # in use below a running sandbox: goes with the emulator
            await self.ground.backing.delete_snapshot(snapshot.backing_id)

    def _snapshot(self, name: str) -> Snapshot | None:
        for snapshot in self.snapshots.values():
            known = {snapshot.snapshot_id, snapshot.snapshot_id.partition(":")[0], snapshot.name}
            if name in known or name.partition(":")[0] in known:
                return snapshot
        return None

    # ------------------------------------------------------------ the end of all

    async def _let_go(self, sandbox: Sandbox) -> None:
        closing: list[Awaitable[None]] = [agent.aclose() for agent in sandbox.agents.values()]
        closing += [process.aclose() for process in sandbox.processes.values()]
        if sandbox.interpreter is not None:
            closing.append(sandbox.interpreter.aclose())
        sandbox.agents, sandbox.processes, sandbox.interpreter = {}, {}, None
        sandbox.watchers.clear()
        await asyncio.gather(*closing, return_exceptions=True)

    async def aclose(self) -> None:
        await self.templates.aclose()
        for command in list(self._commands):
            command.cancel()
        for sandbox in self.table.values():
            sandbox.cut.set()
        await asyncio.gather(*(self._let_go(sandbox) for sandbox in self.table.values()))

    def matching(self, accept: Callable[[Sandbox], bool], extra: Iterable[Sandbox] = ()) -> list[Sandbox]:
        return [sandbox for sandbox in (*self.table.values(), *extra) if accept(sandbox)]
