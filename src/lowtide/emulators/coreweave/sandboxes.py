"""The emulated sandboxes: what exists, how it boots, how long it lives, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from cwsandbox._proto import sandbox_pb2 as pb

from lowtide.emulators.agent.client import Agent, AgentError
from lowtide.emulators.coreweave import spec
from lowtide.emulators.coreweave.logs import Log
from lowtide.emulators.coreweave.model import OVER, Box
from lowtide.emulators.coreweave.refusal import Code, Refused, not_found
from lowtide.errors import LowtideError
from lowtide.providers.base import ProcessHandle, TerminalSize

if TYPE_CHECKING:
    from lowtide.emulators.coreweave.services import Services
    from lowtide.emulators.coreweave.snapshots import Snapshots
    from lowtide.emulators.ground import Ground

_REMEMBERED = 5000  # that are over
_IDLE = ("/bin/sh", "-c", "exec sleep infinity")
_PREPARE = """
umask 022
mkdir -p /usr/local/bin
for name in python python3; do command -v $name > /dev/null || ln -s "$1" /usr/local/bin/$name; done
shift
while [ $# -gt 0 ]; do
  mkdir -p "$2" "$(dirname "$1")" && { [ "$1" = "$2" ] || { rm -rf "$1" && ln -s "$2" "$1"; }; } || exit 1
  shift 2
done
"""
_STORE = "/.cwsandbox/volumes"


class Sandboxes:
    """All of them, ended ones too. Every change of one happens under its own lock."""

    def __init__(self, ground: Ground, services: Services, snapshots: Snapshots) -> None:
        self.ground, self._services, self._snapshots = ground, services, snapshots
        self.table: dict[str, Box] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def get(self, sandbox_id: str) -> Box:
        try:
            return self.table[sandbox_id]
        except KeyError:
            raise not_found(sandbox_id) from None

    # ------------------------------------------------------------ making

    def create(self, box: Box, *, slow: float = 0.0, broken: bool = False) -> None:
        """Answered at once; it boots by itself. Its lifetime runs from here."""
        if self.ground.backing.count >= self.ground.backing.limit:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"this organization holds its limit of {self.ground.backing.limit} sandboxes",
                "CWSANDBOX_RUNNER_CAPACITY_EXHAUSTED",
            )
        self.table[box.sandbox_id] = box
        over = [one for one in self.table.values() if one.state in OVER]
        for old in over[: max(0, len(over) - _REMEMBERED)]:
            del self.table[old.sandbox_id]
        box.timer = self.ground.clock.at(
            box.created_at + box.spec.max_lifetime_seconds, lambda: self._expire(box)
        )
        self.begin(self._boot(box, slow, broken))

    async def _boot(self, box: Box, slow: float, broken: bool) -> None:
        async with box.lock:
            try:
                if slow:
                    await asyncio.sleep(slow)
                if box.state in OVER or box.ending is not None:
                    return
                self._set(box, pb.STATE_CREATING)
                box.backing_id = await self.ground.backing.create(
                    command=_IDLE, limits=spec.limits(box.container), allow=spec.ways_out(box.spec.network)
                )
                await self._furnish(box)
                if broken:
                    raise Refused(Code.INTERNAL, "the image cannot be pulled")
                await self._services.open(box)
                container = box.container
                words = (container.command, *container.args) if container.command else _IDLE
                box.log = Log()
                box.main = await self.start(box, words, booting=True)
            except (LowtideError, AgentError, Refused, OSError) as error:
                await self._finish(box, pb.STATE_FAILED, str(error))
                return
            box.started_at = self.ground.clock.now()
            if box.ending is None:  # else it is terminating, and never runs again
                self._set(box, pb.STATE_RUNNING)
            self.begin(self._follow(box, box.main, box.log))

    async def _furnish(self, box: Box) -> None:
        """Its volumes, files and programs. A mounted volume is a link to its directory, and hides what was there."""
        pairs: list[str] = []
        for mount in box.container.volume_mounts:
            place = f"{_STORE}/{mount.volume}/{mount.sub_path}".rstrip("/")
            pairs += [mount.mount_path, place]
        backing = self.ground.backing
        words = ("/bin/sh", "-c", _PREPARE, "sh", sys.executable, *pairs)
        assert box.backing_id is not None
        code, printed = await backing.run(box.backing_id, words)
        if code != 0:
            raise Refused(Code.INTERNAL, f"volumes: {printed[-300:].decode(errors='replace')}")
        for volume in box.spec.volumes:
            if volume.scratch.restore_from_snapshot_id:
                await self._snapshots.restore(
                    volume.scratch.restore_from_snapshot_id, box.backing_id, f"{_STORE}/{volume.name}"
                )
        for file in box.container.files:
            await self.write(box, file.path, file.content)
        if box.container.working_dir:
            await backing.run(box.backing_id, ("mkdir", "-p", box.container.working_dir))

    async def _follow(self, box: Box, main: ProcessHandle, log: Log) -> None:
        """Keep what the main process prints. When it ends, so does the sandbox."""
        code: int | None = None
        try:
            async for _, data in main.output():
                log.add(self.ground.clock.now(), data)
            code = await main.wait()
        except LowtideError:
            pass
        finally:
            log.end()
            await main.aclose()
        if code is not None:
            box.exit_code = code
        if box.ending is None:
            self.end(box, 0.0, pb.STATE_COMPLETED if code == 0 else pb.STATE_FAILED, _why(code))

    # ------------------------------------------------------------ inside

    async def start(
        self,
        box: Box,
        words: tuple[str, ...],
        *,
        environment: dict[str, str] | None = None,
        stdin: bool = False,
        tty: TerminalSize | None = None,
        booting: bool = False,
    ) -> ProcessHandle:
        """A command as the container's root, with its environment, in its working directory."""
        where = box.backing_id if booting else box.backing
        assert where is not None
        given = {"HOME": "/root", "HOSTNAME": box.sandbox_id, **dict(box.container.environment_variables)}
        return await self.ground.backing.start(
            where,
            words,
            cwd=box.container.working_dir or "/",
            environment={**given, **(environment or {})},
            stdin=stdin,
            tty=tty,
        )

    async def agent(self, box: Box) -> Agent:
        if box.agent is None or box.agent.ended:
            assert box.backing_id is not None
            box.agent = await Agent.start(self.ground.backing, box.backing_id, user=None, home="/root")
        return box.agent

    async def write(self, box: Box, path: str, data: bytes) -> None:
        async def once() -> Any:
            yield data

        await (await self.agent(box)).write_file(path, once())

    # ------------------------------------------------------------ its end

    async def _expire(self, box: Box) -> None:
        await asyncio.shield(self.end(box, 0.0, pb.STATE_TERMINATED, "max lifetime exceeded"))

    def end(
        self,
        box: Box,
        grace_seconds: float,
        state: int,
        reason: str,
        *,
        delay: float = 0.0,
    ) -> asyncio.Task[Any]:
        """Begin its end, once; whoever comes later gets the same one."""
        if box.ending is None:
            if box.state not in OVER:
                self._set(box, pb.STATE_TERMINATING)
            box.ending = self.begin(self._end(box, grace_seconds, state, reason, delay))
        return box.ending

    async def _end(self, box: Box, grace_seconds: float, state: int, reason: str, delay: float) -> None:
        await asyncio.sleep(delay)
        async with box.lock:
            if box.state in OVER:
                return
            for snapshot_id, volume in box.snapshots.items():
                if box.backing_id is not None:
                    await self._snapshots.take(snapshot_id, box.backing_id, f"{_STORE}/{volume}")
            if box.main is not None and grace_seconds > 0:
                with contextlib.suppress(LowtideError, TimeoutError):
                    await box.main.signal(signal.SIGTERM)
                    async with asyncio.timeout(grace_seconds):
                        box.exit_code = await box.main.wait()
            await self._finish(box, state, reason)

    async def _finish(self, box: Box, state: int, reason: str) -> None:
        box.cut.set()
        if box.timer is not None:
            box.timer.cancel()
        self._services.close(box)
        if box.agent is not None:
            await box.agent.aclose()
        if box.log is not None:
            box.log.end()
        if box.backing_id is not None:
            await self.ground.backing.destroy(box.backing_id)
            box.backing_id = None
        box.reason, box.ended_at = reason, self.ground.clock.now()
        self._set(box, state)

    def _set(self, box: Box, state: int) -> None:
        box.state = state
        box.changed.set()
        box.changed = asyncio.Event()

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
            box.cut.set()
            self._services.close(box)
            if box.agent is not None:
                await box.agent.aclose()


def grace(seconds: int) -> float:
    return float(max(0, min(seconds, math.ceil(3600))))


def _why(code: int | None) -> str:
    return "the main process ended" if code == 0 else f"the main process ended with {code}"
