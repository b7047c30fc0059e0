"""Waiting for descriptors, whatever their number: select() ends at 1,024, and one connection more is none."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def readable(descriptors: Iterable[int], seconds: float | None) -> list[int]:
    """Those with something to read, or at their end; none when the time is over."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    found = poll.poll(None if seconds is None else int(min(seconds, 86_400.0) * 1000 + 0.999))
    return [descriptor for descriptor, _ in found]
