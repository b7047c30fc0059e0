"""When to try again what failed: later each time, so that a failure that stays costs next to nothing."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.lifecycle import clock

FIRST_SECONDS = 2.0
MOST_SECONDS = 3600.0


class Retries:
    """Failures by key, in memory: a guardian that starts anew may try everything once."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, float]] = {}

    def due(self, key: str) -> bool:
        """Whether it may be tried now: it never failed, or long enough ago."""
        return key not in self._failed or self._failed[key][1] <= clock.seconds()

    def failed(self, key: str, *, most: float = MOST_SECONDS) -> float:
        """Note a failure. Returns the seconds until it is due again."""
        count = self._failed.get(key, (0, 0.0))[0] + 1
        wait = min(most, FIRST_SECONDS * 2.0 ** min(count - 1, 20))
        self._failed[key] = (count, clock.seconds() + wait)
        return wait

    def succeeded(self, key: str) -> None:
        self._failed.pop(key, None)

    def only(self, keys: Collection[str]) -> None:
        """Forget the others."""
        for key in self._failed.keys() - set(keys):
            del self._failed[key]

    def __len__(self) -> int:
        return len(self._failed)
