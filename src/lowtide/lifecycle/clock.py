"""The machine's own clock: seconds since its boot. Every process reads the same, and nobody steps it.

It goes on while the machine sleeps, as the clocks of hosted services do. The wall clock is for people:
nothing is renewed, given up or ended by it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from lowtide.machine import boot_id

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def seconds() -> float:
    """Since the machine's boot."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class Instant:
    """One reading. It means something to every process on this machine until the machine is restarted."""

    boot: str
    seconds: float

    @classmethod
    def now(cls) -> Self:
        return cls(boot_id(), seconds())

    def elapsed(self) -> float | None:
        """The seconds since then; None for a reading of another machine, or from before a restart."""
        now = Instant.now()
        if self.boot != now.boot or self.seconds > now.seconds:  # a time namespace has a clock of its own
            return None
        return now.seconds - self.seconds

    def __str__(self) -> str:
        return f"{self.boot} {self.seconds!r}"

    @classmethod
    def read(cls, text: str | None) -> Self | None:
        """What `str` has written."""
        if not text:
            return None
        boot, _, seconds = text.rpartition(" ")
        return cls(boot, float(seconds))
