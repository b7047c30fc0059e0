"""Times of day as moments of the machine's own clock, for whoever acts on them.

A keep ends at a time of day, because it outlives a boot. It is translated once, when it is first seen;
from then on the seconds that really pass are counted, and a clock that is set meanwhile changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from lowtide.lifecycle import clock


class Deadlines:
    """One per key; `only` drops the others."""

    def __init__(self) -> None:
        self._moments: dict[str, tuple[float, float]] = {}

    def left(self, key: str, at: float) -> float:
        """Seconds until that time of day, as it was when `at` was first seen here."""
        known = self._moments.get(key)
        if known is None or known[0] != at:
            known = self._moments[key] = (at, clock.seconds() + at - time.time())
        return known[1] - clock.seconds()

    def only(self, keys: Collection[str]) -> None:
        for key in self._moments.keys() - set(keys):
            del self._moments[key]
