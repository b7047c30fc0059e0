"""Exit and signals: end what this process holds when it leaves, without changing how it leaves.

* Normal exit and unhandled exceptions: an exit hook.
* SIGINT: nothing is installed. Python turns it into KeyboardInterrupt, ``with`` blocks unwind and the
  exit hook runs; so event loops, notebooks and pytest keep their own handling, and a swallowed
  Ctrl+C changes nothing. A second Ctrl+C while the hook waits leaves at once: the guardian takes over.
* SIGTERM, SIGHUP: a handler, only where the default action (die) is in force, because then no exit
  hook would run. It ends everything and then dies of the same signal, so the exit status is the same.
  Where the program has a handler of its own, that one decides: if it exits, the exit hook runs.
  Installed later, on top of ours, it may call ours in turn.
* ``LOWTIDE_SIGNALS=off`` leaves signals to the embedding program. The exit hook and the guardian stay.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Protocol

from lowtide.engine import engine, started
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.lease import EndReport, Outcome

log = logging.getLogger("lowtide.lifecycle")

HANDLED = (signal.SIGTERM, signal.SIGHUP)


class EndEverything(Protocol):
    def __call__(self, *, failed: bool) -> Coroutine[Any, Any, list[EndReport]]: ...


_end_everything: EndEverything | None = None
_hooked = False
_signals_installed = False
_leaving = False


def install(end_everything: EndEverything, holding: int) -> None:
    """Arm the exit hook and the handlers for so many leases; cheap to call before every create, from any thread."""
    global _end_everything, _hooked
    _end_everything = end_everything
    engine().have_workers(holding)
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
    if not _signals_installed and os.environ.get("LOWTIDE_SIGNALS", "").lower() not in (
        "off",
        "0",
        "no",
        "false",
    ):
        _run_on_main_thread(_install_handlers)


def forget() -> None:
    """In a forked child: keep the parent's hooks from running here; arm our own on the next create."""
    global _end_everything, _leaving
    _end_everything = None
    _leaving = False


def _install_handlers() -> None:
    global _signals_installed
    if _signals_installed:
        return
    _signals_installed = True
    for number in HANDLED:
        with contextlib.suppress(ValueError, OSError):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _leaving
    if not _leaving:
        _leaving = True
        point("signal:begin")
        _end_now(failed=False)
    # Die of the signal, as without us. A second signal during the clean-up comes here directly.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _at_exit() -> None:
    # sys.last_value is set when an exception ended the main thread: then the owner has failed.
    failed = getattr(sys, "last_value", None) is not None
    _end_now(failed=failed)


def _end_now(*, failed: bool) -> None:
    """End everything and wait, in the thread that is leaving. Never raises; never hangs."""
    if _end_everything is None or not started():
        return
    loop = engine()
    try:
        # The engine may be unable to answer: the signal can land while this very thread holds a lock
        # it needs. Then leave; the rows are on disk and the guardian ends them.
        loop.run(_pong(), timeout=2.0)
        reports = loop.run(_end_everything(failed=failed))
    except KeyboardInterrupt:
        log.warning("interrupted while ending sandboxes; the guardian ends the rest")
        return
    except BaseException as error:
        log.warning("could not end all sandboxes: %s; the guardian ends the rest", error)
        return
    left = [report for report in reports if report.outcome is Outcome.FAILED]
    if left:
        ids = ", ".join(str(report.sandbox_id) for report in left)
        log.error(
            "%d sandboxes could not be ended and stay in the ledger: %s; run: lowtide sweep", len(left), ids
        )


async def _pong() -> None:
    return None


_pending: list[Any] = []


def _run_on_main_thread(action: Callable[[], None]) -> None:
    """Now if this is the main thread, else as soon as the main thread runs Python code again.

    Handlers can only be installed there. Until it happens the default action stays in force: the
    process dies of the signal at once and the guardian ends what it held.
    """
    if threading.current_thread() is threading.main_thread():
        action()
        return
    if _pending:
        return
    import ctypes

    def call(_: Any) -> int:
        with contextlib.suppress(Exception):
            action()
        return 0

    _pending.append(ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call))
    ctypes.pythonapi.Py_AddPendingCall(_pending[0], None)
