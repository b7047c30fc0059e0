"""Measuring two things side by side: interleaved samples, medians, one ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Skipped(Exception):
    """A row that cannot be measured on this machine. Its text says what is missing and how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row of the table. `ours` and `raw` are samples in the same unit; `raw` may be empty."""

    name: str
    what: str
    against: str
    limit: float | None
    """Of the ratio. None: only `at_most` counts."""
    unit: str
    ours: tuple[float, ...]
    raw: tuple[float, ...]
    details: dict[str, Any]
    at_most: float | None = None
    """In the unit. With a `limit`, either one is enough."""

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ours) / statistics.median(self.raw) if self.raw else None

    @property
    def met(self) -> bool:
        if self.at_most is not None and statistics.median(self.ours) <= self.at_most:
            return True
        return self.limit is not None and self.ratio is not None and self.ratio <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "against": self.against,
            "unit": self.unit,
            "ours": _summary(self.ours),
            "raw": _summary(self.raw) if self.raw else None,
            "ratio": round(self.ratio, 3) if self.ratio is not None else None,
            "limit": self.limit,
            "at_most": self.at_most,
            "met": self.met,
            "details": self.details,
        }


def interleave(
    ours: Callable[[], float],
    raw: Callable[[], float],
    *,
    samples: int,
    warm_up: int = 3,
    pause: float = 0.0,
    in_a_row: int = 1,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Take samples in turn, and in changing order, so that drift of the machine falls on both alike.

    `pause`: seconds before each, so that what the one does after its sample is no burden on the other's.
    `in_a_row`: so many of one side before the other's turn, so that what it does after its sample burdens its own next.
    """
    mine: list[float] = []
    theirs: list[float] = []
    for n in range(-warm_up, samples // in_a_row):
        pair = [(ours, mine), (raw, theirs)]
        for measure, into in pair if n % 2 else reversed(pair):
            for _ in range(in_a_row):
                time.sleep(pause)
                value = measure()
                if n >= 0:
                    into.append(value)
    return tuple(mine), tuple(theirs)


def timed(work: Callable[[], object]) -> float:
    """Milliseconds on the clock."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def _summary(samples: tuple[float, ...]) -> dict[str, Any]:
    ordered = sorted(samples)
    return {
        "median": round(statistics.median(ordered), 4),
        "p10": round(ordered[len(ordered) // 10], 4),
        "p90": round(ordered[len(ordered) * 9 // 10], 4),
        "samples": len(ordered),
    }
