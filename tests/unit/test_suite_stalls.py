"""What the suite adds to a promised time is what the machine took, and never what the product slept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.crash.stalls import Stalls

BUSY = "import os, sys, time\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: EVERY"
SECONDS = 2.0


def test_waiting_for_a_processor_is_added_and_sleeping_is_not(tmp_path: Path) -> None:
    processor = str(min(os.sched_getaffinity(0)))
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count how long a process waits for a processor")
    guardian = {**os.environ, "LOWTIDE_HOME": str(tmp_path)}
    sleeping, busy = BUSY.replace("EVERY", "time.sleep(9)"), BUSY.replace("EVERY", "pass")
    started = [subprocess.Popen([sys.executable, "-c", sleeping, processor], env=guardian)]
    try:
        _stalled(tmp_path)
        asleep, _ = _stalled(tmp_path)
        started += [subprocess.Popen([sys.executable, "-c", busy, processor], env=guardian) for _ in range(4)]
        _stalled(tmp_path)  # until they have begun
        contending, took = _stalled(tmp_path)
    finally:
        for process in started:
            process.kill()
            process.wait()
    # Four on one processor: each waits three quarters of the time, though a wait counts only once it is over.
    assert contending > took / 3, (contending, took)
    assert asleep < contending, (asleep, contending)


def _stalled(home: Path) -> tuple[float, float]:
    began, stalls = time.monotonic(), Stalls(home)
    while time.monotonic() < began + SECONDS:
        stalls.sleep(0.03)
        stalls.seconds()
    return stalls.seconds(), time.monotonic() - began
