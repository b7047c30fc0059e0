"""The machine's own stalls while a case waits: what a promise with a time in it is not to blame for.

On a busy machine everything is late, so a bound of a second fails an honest test and a bound of twenty proves nothing.
So the one who waits measures what the machine costs meanwhile, and just that is added to the bound: how long those that
take part were ready to run and not let to, as the kernel counts it (their time asleep, which may be ours to answer for,
is not in it); and how late a sleeping process wakes and how much longer than usual it takes to start and end
``/bin/true``, which stand for whatever came and went unseen. Measured with fourteen processes on two processors: half a
second of work took 7.5 s, 7.0 of them by the kernel's count, and woke and started no later than on an idle machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_TRUE = next((path for path in ("/bin/true", "/usr/bin/true") if os.path.exists(path)), "true")
_LOOK_SECONDS = 0.5
"""How often it is looked who takes part: to read of every process costs more than to read of those."""


def _start_and_end_a_process() -> float:
    began = time.monotonic()
    os.waitpid(os.posix_spawn(_TRUE, [_TRUE], {}), 0)
    return time.monotonic() - began


class Stalls:
    """Sleeps for a wait, and sums up what the machine added to it.

    Those that take part are this process with all that it has started, and whatever runs with `home` as its home.
    """

    usual = min(_start_and_end_a_process() for _ in range(5))
    """The fastest start seen in this process so far."""

    def __init__(self, home: Path) -> None:
        self._home = f"LOWTIDE_HOME={home}".encode()
        self._taking_part: set[int] = set()
        self._looked = 0.0
        self._waits: dict[tuple[int, str], int] = {}
        self._look()
        self._late = self._kept = 0.0

    def sleep(self, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        late = max(0.0, time.monotonic() - began - seconds)
        took = _start_and_end_a_process()
        Stalls.usual = min(Stalls.usual, took)
        self._late += late + took - Stalls.usual

    def seconds(self) -> float:
        """What the machine has added up to now. Not the sum of both: those who wait are late for the same cause."""
        self._kept += self._look()
        return max(self._late, self._kept)

    def _look(self) -> float:
        """For how long since the last look the one was kept from a processor that was kept longest.

        One of them at a time does what the others wait for, so their waits are not added up.
        """
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._taking_part = _descendants(os.getpid()) | set(_at_home(self._home))
            self._looked = time.monotonic()
        longest = 0
        for pid in self._taking_part:
            for thread, waited in _waits(pid):
                longest = max(longest, waited - self._waits.get((pid, thread), 0))
                self._waits[pid, thread] = waited
        return longest / 1e9


def _waits(pid: int) -> Iterator[tuple[str, int]]:
    """For each thread the nanoseconds it was ready to run and did not."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield thread, int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1])
    except OSError:
        return  # ended meanwhile, or a kernel that does not count


def _descendants(pid: int) -> set[int]:
    """This process, and all that it and those have started and that still are theirs."""
    found, waiting = {pid}, [pid]
    while waiting:
        one = waiting.pop()
        try:
            tasks = os.listdir(f"/proc/{one}/task")
            children = " ".join(Path(f"/proc/{one}/task/{task}/children").read_text() for task in tasks)
        except OSError:
            continue
        new = {int(child) for child in children.split()} - found
        found |= new
        waiting += new
    return found


def _at_home(home: bytes) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if home in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    yield int(name)
            except OSError:
                continue
