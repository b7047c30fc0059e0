"""A delete that is confirmed: one state machine, whose states are `End`.

::

    ask ──► MISSING                                         it was not there: False
     │ ───► REFUSED ──► the service's second way, or AuthenticationError
     │ ───► BUSY ─────► look ──► THERE:  wait, ask again   for `busy_seconds`
     └────► ACCEPTED ─► look ──► ENDING: wait, look         for `confirm_seconds`
                         │ ────► THERE:  wait, ask again once that is no mere lag, look
                         └─────► GONE                       proven by id: True
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable
from typing import Any

from lowtide import errors, logger
from lowtide.backoff import backoff
from lowtide.providers.hosted.service import Service

BUSY_SECONDS = 30.0
"""How long another change of the sandbox's state may keep a delete waiting."""
CONFIRM_SECONDS = 20.0
"""How long an accepted delete may take. After that the caller tries again; nothing is forgotten."""
_LAG_SECONDS = 0.3
"""For so long an accepted delete may just not show yet; then it is asked for again."""


class End(enum.Enum):
    """Where the end of one sandbox is."""

    MISSING = "it was not there"
    REFUSED = "this key may not end it"
    BUSY = "another change of its state is under way"
    ACCEPTED = "its end was acknowledged"
    THERE = "it is there as before"
    ENDING = "it is on its way out"
    GONE = "it is not found by its id"


Ask = Callable[[], Awaitable[End]]
"""Asks for the end: MISSING, REFUSED, BUSY, ACCEPTED, ENDING or GONE. Raises LowtideError."""
Look = Callable[[], Awaitable[End]]
"""Looks by id, never in a list, which lags: THERE, ENDING or GONE. Raises LowtideError."""


async def delete(
    ask: Ask,
    look: Look,
    *,
    service: Service,
    sandbox_id: str,
    instead: Ask | None = None,
    busy_seconds: float = BUSY_SECONDS,
    confirm_seconds: float = CONFIRM_SECONDS,
) -> bool:
    """True: ended now, confirmed. False: it was already gone.

    `instead`: what to do where the key may not delete; it answers as `ask` does, or raises.
    """
    return await _Delete(ask, look, service, sandbox_id, instead, busy_seconds, confirm_seconds).run()


class _Delete:
    def __init__(
        self,
        ask: Ask,
        look: Look,
        service: Service,
        sandbox_id: str,
        instead: Ask | None,
        busy_seconds: float,
        confirm_seconds: float,
    ) -> None:
        self._ask, self._look, self._instead = ask, look, instead
        self._service, self._sandbox_id = service, sandbox_id
        self._busy_seconds, self._confirm_seconds = busy_seconds, confirm_seconds
        self._began = time.monotonic()
        self._accepted: float | None = None
        self._delays = backoff()

    async def run(self) -> bool:
        state = await self._asked()
        while state not in (End.GONE, End.MISSING):
            if state in (End.ACCEPTED, End.ENDING) and self._accepted is None:
                self._accepted = time.monotonic()
                # A call takes this long here; looking much more often than that tells nothing sooner.
                took = self._accepted - self._began
                self._delays = backoff(min(max(took * 0.25, 0.0005), 0.05), 1.0, factor=1.6)
            state = await self._after(state)
        return state is End.GONE

    async def _after(self, state: End) -> End:
        """The next state. Raises when there is none within the bounds."""
        if state in (End.ACCEPTED, End.BUSY):
            return await self._seen()
        if state is End.REFUSED:
            if self._instead is None:
                raise errors.AuthenticationError(
                    f"this key may not delete sandbox {self._sandbox_id}. Delete it with a key that may",
                    **self._context,
                )
            return await self._instead()
        since, bound = self._began, self._busy_seconds
        if self._accepted is not None:
            since, bound = self._accepted, self._confirm_seconds
        if time.monotonic() - since > bound:
            raise errors.SandboxUnavailableError(self._overdue(state), **self._context)
        delay = next(self._delays)
        await asyncio.sleep(delay)
        if state is End.THERE and (self._accepted is None or delay > _LAG_SECONDS):
            asked = await self._asked()
            return End.GONE if asked is End.MISSING else asked  # it was there, and we have asked
        return await self._seen()

    async def _asked(self) -> End:
        if self._accepted is None:
            return await self._ask()
        return await self._tolerant(self._ask)

    async def _seen(self) -> End:
        return await self._tolerant(self._look)

    async def _tolerant(self, asking: Ask) -> End:
        """No answer is no reason to forget that the end was acknowledged: for as long as that may take."""
        try:
            return await asking()
        except errors.LowtideError as error:
            wait = getattr(error, "retry_after_seconds", None) or 0.0
            late = time.monotonic() + wait - (self._accepted or 0.0) > self._confirm_seconds
            if self._accepted is None or not error.retryable or late:
                raise
            log = logger.get(f"lowtide.{self._service.provider}")
            log.info("sandbox %s: its end was acknowledged, not confirmed yet: %s", self._sandbox_id, error)
            await asyncio.sleep(wait)
            return End.ENDING

    def _overdue(self, state: End) -> str:
        if self._accepted is None:
            return f"{self._service.name} does not delete {self._sandbox_id} yet: {End.BUSY.value}"
        return f"{self._service.name} acknowledged the end of {self._sandbox_id}, but {state.value}"

    @property
    def _context(self) -> dict[str, Any]:
        return {"provider": self._service.provider, "sandbox_id": self._sandbox_id}
