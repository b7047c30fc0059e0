"""The emulators' clock: real time plus an offset that tests can move, and the timers that hang on it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

log = logging.getLogger("lowtide.emulators")

_LATEST = datetime(5000, 1, 1, tzinfo=UTC).timestamp()
_LONGEST_NAP_SECONDS = 20.0  # the machine's own clock can be set, too


class Timer:
    """One action at one time. Cancelling it twice, or after it ran, is fine."""

    __slots__ = ("action", "cancelled", "when")

    def __init__(self, when: float, action: Callable[[], Awaitable[None]]) -> None:
        self.when = when
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Unix seconds that lifetimes are counted in. Belongs to one event loop."""

    def __init__(self) -> None:
        self._offset = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._nap: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        return time.time() + self._offset

    def datetime(self) -> datetime:
        return datetime.fromtimestamp(self.now(), UTC)

    def at(self, when: float, action: Callable[[], Awaitable[None]]) -> Timer:
        """Run `action` once the clock shows `when`, whether time passed or was moved."""
        timer = Timer(when, action)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        self._arm()
        return timer

    def room_seconds(self) -> float:
        """How far it can still be moved, so that every time and every lifetime from then on can be written down."""
        return max(0.0, _LATEST - self.now())

    async def advance(self, seconds: float) -> float:
        """Move the clock forward and wait for everything that became due. Returns the new time."""
        self._offset += seconds
        while (due := self._take_due()) or self._running:
            # An action may set a timer that is due at once, and that may be running by now.
            await asyncio.gather(*(self._run(timer) for timer in due), *self._running)
        self._arm()
        return self.now()

    def close(self) -> None:
        self._timers.clear()
        if self._nap is not None:
            self._nap.cancel()
        for task in self._running:
            task.cancel()

    def _take_due(self) -> list[Timer]:
        due = []
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                due.append(timer)
        return due

    def _arm(self) -> None:
        if self._nap is not None:
            self._nap.cancel()
            self._nap = None
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if self._timers:
            nap = max(0.0, min(self._timers[0][0] - self.now(), _LONGEST_NAP_SECONDS))
            self._nap = asyncio.get_running_loop().call_later(nap, self._wake)

    def _wake(self) -> None:
        for timer in self._take_due():
            task = asyncio.get_running_loop().create_task(self._run(timer))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        self._arm()

    async def _run(self, timer: Timer) -> None:
        if timer.cancelled:
            return
        try:
            await timer.action()
        except Exception:
            log.exception("a timer of the emulator failed")
