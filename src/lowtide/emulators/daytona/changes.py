"""How a sandbox goes from one state to the next: who is told, and what goes on after the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from lowtide.emulators.daytona.answers import Refused
from lowtide.emulators.daytona.sandbox import SETTLED, Sandbox, SandboxState
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

log = logging.getLogger("lowtide.emulators")

Tell = Callable[[Sandbox, SandboxState, SandboxState], Awaitable[None]]


class Changes:
    """A part of `Sandboxes`."""

    def __init__(self, ground: Ground, tell: Tell) -> None:
        self.ground = ground
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()

    def _arm(self, sandbox: Sandbox) -> None:
        """Set the clock to what is due next in its new state."""
        raise NotImplementedError

    def _settled(self, sandbox: Sandbox, *allowed: SandboxState) -> None:
        if sandbox.state not in SETTLED:
            raise Refused(409, "Sandbox state change in progress")
        if sandbox.state not in allowed:
            raise Refused(400, f"Sandbox is not in valid state: it is {sandbox.state}")

    async def _through(
        self, sandbox: Sandbox, via: SandboxState, to: SandboxState, work: Callable[[], Awaitable[None]]
    ) -> asyncio.Task[None]:
        """Answer with the state on the way; the rest goes on by itself."""
        await self._set(sandbox, via)

        async def go() -> None:
            async with sandbox.lock:
                if sandbox.state is not via:
                    return
                try:
                    await work()
                except LowtideError as error:
                    sandbox.error_reason = str(error)
                    await self._set(sandbox, SandboxState.ERROR)
                    return
                if sandbox.state is via:  # an expiry may have come in between
                    await self._set(sandbox, to)

        return self._begin(go())

    async def _set(self, sandbox: Sandbox, state: SandboxState) -> None:
        before, sandbox.state = sandbox.state, state
        sandbox.updated_at = self.ground.clock.now()
        if state in SETTLED:
            self._arm(sandbox)
        await self._tell(sandbox, before, state)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a change of a sandbox failed", exc_info=task.exception())
