"""At exit: let the SDK's own threads come to rest before the interpreter is taken apart.

pyqwest's threads hand each answer back to Python. One that is still at it when the interpreter ends is
stopped in the middle of its Rust frames, and that aborts the whole process with a signal (about one
exit in sixty). So calls still on their way are given up, and the threads get a moment.

Registered when this package is imported: that is before the first create arms the exit hook that
ends sandboxes, and exit hooks run in the opposite order.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import time
from typing import Any

from lowtide import engine

_SECONDS = 1.0
_REST_SECONDS = 0.05

_calls: set[asyncio.Future[Any]] = set()


def track(call: asyncio.Future[Any]) -> None:
    """Give this one up at exit, if it is still on its way."""
    _calls.add(call)
    call.add_done_callback(_calls.discard)


def _at_exit() -> None:
    if "pyqwest" not in sys.modules or not engine.started():
        return
    running = engine.engine()
    with contextlib.suppress(Exception):  # leaving anyway, and the sandboxes are ended by now
        running.run(_give_up(running.loop), timeout=_SECONDS * 2)
    time.sleep(_REST_SECONDS)


async def _give_up(loop: asyncio.AbstractEventLoop) -> None:
    left = [call for call in _calls if not call.done() and call.get_loop() is loop]
    for call in left:
        call.cancel()
    if left:
        await asyncio.wait(left, timeout=_SECONDS)


atexit.register(_at_exit)
