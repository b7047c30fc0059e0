"""When something is due, by a clock that nobody can set.

The ledger keeps times of day, because they outlive a boot. Whoever acts on one translates it once, when
it is first seen, and from then on counts the seconds that really pass, a sleeping laptop's included. A
clock that is set forward or back meanwhile changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """The time of day, in Unix seconds. Somebody may set it."""
        ...

    def elapsed(self) -> float:
        """Seconds since some moment of this boot. Nobody sets it, and it counts while the machine sleeps."""
        ...


class MachineClock:
    def now(self) -> float:
        return time.time()

    def elapsed(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class Deadlines:
    """Times of day as moments of the clock that nobody sets. One entry per key, dropped by `only`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moments: dict[Hashable, tuple[float, float]] = {}

    def left(self, key: Hashable, at: float, *, most: float = float("inf")) -> float:
        """Seconds until that time of day, as it was when `at` was first seen here; never more than `most`."""
        known = self._moments.get(key)
        if known is None or known[0] != at:
            seconds = min(at - self._clock.now(), most)
            known = self._moments[key] = (at, self._clock.elapsed() + seconds)
        return known[1] - self._clock.elapsed()

    def only(self, keys: Collection[Hashable]) -> None:
        """Forget the others."""
        for key in self._moments.keys() - set(keys):
            del self._moments[key]
