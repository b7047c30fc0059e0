"""An owner that is busy logging, creating and ending, and gets one signal after the other: it is gone within its bound.

`LOWTIDE_CRASH_STORMS` sets how many storms there are.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from tests.crash.world import FACTOR, World

EXIT_SECONDS, OVERTIME_SECONDS = 5.0, 5.0
STORMS = int(os.environ.get("LOWTIDE_CRASH_STORMS", "4"))
BUSY = """
    import logging, threading
    logging.basicConfig(level=logging.INFO, filename=os.devnull)

    def log():
        while True:
            logging.getLogger("busy").info("a line of the program")

    for _ in range(2):
        threading.Thread(target=log, daemon=True).start()
    made = make()
    say("READY")
    while True:
        logging.getLogger("main").info("another one")
        with contextlib.suppress(KeyboardInterrupt):
            with Sandbox.run(**OPTIONS):
                pass
"""


@pytest.mark.parametrize("storm", range(STORMS))
def test_one_signal_after_the_other(world: World, storm: int) -> None:
    random_signals = random.Random(storm)
    actor = world.start_program("    import contextlib\n" + BUSY, 1, LOWTIDE_EXIT_SECONDS=f"{EXIT_SECONDS:g}")
    actor.until("READY")
    time.sleep(random_signals.uniform(0, 0.3))
    with contextlib.suppress(ProcessLookupError):
        for _ in range(20):
            actor.process.send_signal(random_signals.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
            time.sleep(random_signals.choice((0.0, 0.001, 0.02)))
        actor.process.terminate()
    assert actor.wait((EXIT_SECONDS + OVERTIME_SECONDS) * FACTOR) != 0
    world.wait_until_clean()
