"""The machine's own stalls while a case waits: what a promise with a time in it is not to blame for.

On a busy machine everything is late, so a bound of a second fails an honest test and a bound of twenty proves nothing.
So the one who waits measures what the machine costs meanwhile: how late a sleeping process wakes, and how much longer
than usual it takes to start and end ``/bin/true``. Just that is added to the bound.
"""

from __future__ import annotations

import os
import time

_TRUE = next((path for path in ("/bin/true", "/usr/bin/true") if os.path.exists(path)), "true")


def _start_and_end_a_process() -> float:
    began = time.monotonic()
    os.waitpid(os.posix_spawn(_TRUE, [_TRUE], {}), 0)
    return time.monotonic() - began


class Stalls:
    """Sleeps for a wait, and sums up what the machine added to it."""

    usual = min(_start_and_end_a_process() for _ in range(5))
    """The fastest start seen in this process so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self.seconds += max(0.0, time.monotonic() - began - seconds)
        took = _start_and_end_a_process()
        Stalls.usual = min(Stalls.usual, took)
        self.seconds += took - Stalls.usual
