"""The emulated sandboxes: what exists, how it boots, how long it lives, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from grpclib import Status

from lowtide.emulators.backing import allowed
from lowtide.emulators.modal.executions import Execution
from lowtide.emulators.modal.model import Box, Result
from lowtide.emulators.modal.refusal import Refused, not_found
from lowtide.errors import LowtideError
from lowtide.providers.base import Limits, TerminalSize

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground
    from lowtide.emulators.modal.tunnels import Tunnels

_REMEMBERED = 5000  # that are over
_HOME = "/root"
_IDLE = ("/bin/sh", "-c", "exec sleep infinity")


class Sandboxes:
    """All of them, ended ones too."""

    def __init__(self, ground: Ground, tunnels: Tunnels) -> None:
        self.ground, self._tunnels = ground, tunnels
        self.table: dict[str, Box] = {}
        self._tasks_of: dict[str, Box] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._newest = 0.0

    def get(self, sandbox_id: str) -> Box:
        try:
            return self.table[sandbox_id]
        except KeyError:
            raise not_found("Sandbox", sandbox_id) from None

    def of_task(self, task_id: str) -> Box:
        try:
            return self._tasks_of[task_id]
        except KeyError:
            raise not_found("task", task_id) from None

    def id_of_task(self, task_id: str) -> str:
        found = self._tasks_of.get(task_id)
        return found.sandbox_id if found is not None else ""

    def named(self, app_id: str, name: str) -> list[Box]:
        """Those of that name, the newest first; at most one of them is not over."""
        found = [box for box in self.table.values() if box.app.app_id == app_id and box.name == name]
        return sorted(found, key=lambda box: (not box.is_over, box.created_at), reverse=True)

    def moment(self) -> float:
        """Now, and later than every moment before: lists are paged by it."""
        self._newest = max(self.ground.clock.now(), self._newest + 1e-6)
        return self._newest

    # ------------------------------------------------------------ making

    def create(self, box: Box, *, slow: float = 0.0, broken: bool = False) -> None:
        """Answered at once; it boots by itself. Its lifetime runs from here."""
        if self.ground.backing.count >= self.ground.backing.limit:
            raise Refused(
                Status.RESOURCE_EXHAUSTED,
                f"this workspace holds its limit of {self.ground.backing.limit} sandboxes",
            )
        self.table[box.sandbox_id] = self._tasks_of[box.task_id] = box
        over = [one for one in self.table.values() if one.is_over] if len(self.table) > _REMEMBERED else []
        for old in over[: max(0, len(over) - _REMEMBERED)]:
            del self.table[old.sandbox_id], self._tasks_of[old.task_id]
            if old.main is not None:
                old.main.close()
        box.timer = self.ground.clock.at(
            box.created_at + box.definition.timeout_secs,
            lambda: self._expire(box, Result.GENERIC_STATUS_TIMEOUT),
        )
        self.begin(self._boot(box, slow, broken))

    async def _boot(self, box: Box, slow: float, broken: bool) -> None:
        async with box.lock:
            try:
                if slow:
                    await asyncio.sleep(slow)
                if box.ending is not None:
                    return
                await self._make(box)
                if broken:
                    raise Refused(Status.INTERNAL, "the container could not be started")
                words = tuple(box.definition.entrypoint_args) or _IDLE
                box.main = await self._start_main(box, words)
            except (LowtideError, Refused, OSError) as error:
                status = Result.GENERIC_STATUS_INIT_FAILURE
                await self._finish(box, Result(status=status, exitcode=1, exception=str(error)))
                return
        self.begin(box.main.run(lambda: self._main_ended(box)))
        box.booted.set()
        self.idle(box)
        self.begin(self._probe(box))

    async def _make(self, box: Box) -> None:
        access, need = box.definition.network_access, box.definition.resources
        entries = [*access.allowed_cidrs, *access.allowed_domains]
        shut = access.network_access_type in (access.BLOCKED, access.ALLOWLIST)
        backing = self.ground.backing
        box.backing_id = await backing.create(
            command=_IDLE,
            snapshot=box.image.snapshot,
            ports=tuple(one.port for one in box.definition.open_ports.ports),
            allow=allowed(entries) if shut or entries else None,
            limits=Limits(
                cpu=need.milli_cpu_max / 1000 or None, memory_bytes=(need.memory_mb_max << 20) or None
            ),
        )
        if self.workdir(box) != _HOME:
            code, printed = await backing.run(box.backing_id, ("mkdir", "-p", self.workdir(box)))
            if code != 0:
                raise Refused(Status.INTERNAL, f"workdir: {printed[-300:].decode(errors='replace')}")

    async def _start_main(self, box: Box, words: tuple[str, ...]) -> Execution:
        assert box.backing_id is not None
        size = terminal(box.definition.pty_info) if box.definition.HasField("pty_info") else None
        handle = await self.ground.backing.start(
            box.backing_id,
            words,
            cwd=self.workdir(box),
            environment=self.environment(box),
            stdin=True,
            tty=size,
        )
        return Execution(handle, self.ground.state.directory, keep=(True, True), merge=False)

    def workdir(self, box: Box) -> str:
        return box.definition.workdir or box.image.workdir or _HOME

    def environment(self, box: Box) -> dict[str, str]:
        own = {
            "HOME": _HOME,
            "MODAL_SANDBOX_ID": box.sandbox_id,
            "MODAL_TASK_ID": box.task_id,
            "MODAL_ENVIRONMENT": box.app.environment,
        }
        return {**own, **box.image.environment, **box.environment}

    async def _probe(self, box: Box) -> None:
        """Ask again and again whether it is ready, as its probe says."""
        if not box.definition.HasField("readiness_probe"):
            return
        probe = box.definition.readiness_probe
        words = tuple(probe.exec_command.argv)
        if probe.WhichOneof("probe_oneof") == "tcp_port":
            words = ("/bin/bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{probe.tcp_port}")
        while not box.over.is_set() and box.backing_id is not None:
            handle = await self.ground.backing.start(
                box.backing_id, words, cwd=self.workdir(box), environment=self.environment(box)
            )
            try:
                async for _ in handle.output():
                    pass
                code = await handle.wait()
            finally:
                await handle.aclose()
            if code == 0:
                box.ready_at = self.ground.clock.now()
                box.ready.set()
                return
            await asyncio.sleep(max(0.01, (probe.interval_ms or 100) / 1000))

    # ------------------------------------------------------------ idle

    def hold(self, box: Box) -> None:
        """Something is going on in there."""
        box.busy += 1
        if box.idle_timer is not None:
            box.idle_timer.cancel()
            box.idle_timer = None

    def release(self, box: Box) -> None:
        box.busy -= 1
        self.idle(box)

    def idle(self, box: Box) -> None:
        seconds = box.definition.idle_timeout_secs
        if not seconds or box.busy or box.is_over:
            return
        if box.idle_timer is not None:
            box.idle_timer.cancel()
        box.idle_timer = self.ground.clock.at(
            self.ground.clock.now() + seconds, lambda: self._expire(box, Result.GENERIC_STATUS_IDLE_TIMEOUT)
        )

    # ------------------------------------------------------------ its end

    def _main_ended(self, box: Box) -> None:
        main = box.main
        if main is None or (main.code is None and not main.lost):
            return
        if main.code is None:  # nobody knows how
            self.end(box, Result(status=Result.GENERIC_STATUS_INTERNAL_FAILURE, exitcode=1))
            return
        status = Result.GENERIC_STATUS_SUCCESS if main.code == 0 else Result.GENERIC_STATUS_FAILURE
        self.end(box, Result(status=status, exitcode=main.code))

    async def _expire(self, box: Box, status: Any) -> None:
        await asyncio.shield(self.end(box, Result(status=status, exitcode=124)))

    def end(self, box: Box, result: Any) -> asyncio.Task[Any]:
        """Begin its end, once; whoever comes later gets the same one."""
        if box.ending is None:
            box.ending = self.begin(self._end(box, result))
        return box.ending

    async def _end(self, box: Box, result: Any) -> None:
        async with box.lock:
            if not box.is_over:
                await self._finish(box, result)

    async def _finish(self, box: Box, result: Any) -> None:
        for timer in (box.timer, box.idle_timer):
            if timer is not None:
                timer.cancel()
        self._tunnels.close(box)
        if box.backing_id is not None:
            await self.ground.backing.destroy(box.backing_id)
            box.backing_id = None
        if box.main is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(box.main.over.wait(), 5)
        for execution in box.executions.values():
            execution.close()
        box.executions.clear()
        box.ended_at = self.ground.clock.now()
        box.result = result
        box.over.set()
        box.booted.set()

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
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
        for box in self.table.values():
            self._tunnels.close(box)
            if box.main is not None:
                box.main.close()
            for execution in box.executions.values():
                execution.close()


def terminal(info: Any) -> TerminalSize | None:
    if not info.enabled:
        return None
    return TerminalSize(columns=min(info.winsz_cols or 80, 10_000), rows=min(info.winsz_rows or 24, 10_000))
