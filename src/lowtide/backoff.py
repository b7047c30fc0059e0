"""The delays of whoever asks again: each longer than the last, up to a bound."""

from __future__ import annotations

from collections.abc import Iterator


def backoff(first: float = 0.05, most: float = 2.0, *, factor: float = 2.0) -> Iterator[float]:
    """Seconds to wait before each further try, without an end: the caller has the deadline."""
    delay = min(first, most)
    while True:
        yield delay
        delay = min(delay * factor, most)
