"""Exit and signals: end what this process holds when it leaves, without changing how it leaves.

* Normal exit and unhandled exceptions: an exit hook.
* SIGINT: nothing is installed. Python turns it into KeyboardInterrupt, ``with`` blocks unwind and the
  exit hook runs; so event loops, notebooks and pytest keep their own handling, and a swallowed
  Ctrl+C changes nothing. A second Ctrl+C while the hook waits leaves at once: the guardian takes over.
* SIGTERM, SIGHUP: a handler, only where the default action (die) is in force, because then no exit
  hook would run. It ends everything and then dies of the same signal, so the exit status is the same.
  As process 1 of a pid namespace, which the kernel lets no such signal kill, it exits with 128 + the signal.
  Where the program, or a library of it, has a handler of its own, that one decides: if it exits, the exit hook runs.
  Installed later, on top of ours, it may call ours in turn.
  Python runs handlers on the main thread, between two of its own steps. While that thread is in C code that does not
  come back (the loop of a GUI toolkit, a long query) the engine leaves in its place: it hears of the signal at once.
* ``LOWTIDE_SIGNALS=off`` leaves signals to the embedding program. The exit hook and the guardian stay.

A handler or hook takes no lock that the code it interrupted may hold, and logs nothing itself. It waits for the
engine until the exit deadline (``LOWTIDE_EXIT_SECONDS``, 30 s) and a second for the reports, and leaves earlier when the
engine stands still. `OVERTIME_SECONDS` after the deadline the kernel ends the process, whatever it does then.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Protocol

from lowtide import exit_timer, logger, settings, threads
from lowtide.engine import engine, started
from lowtide.in_background import in_background
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.lease import EndReport, Outcome

log = logger.get("lowtide.lifecycle")

HANDLED = (signal.SIGTERM, signal.SIGHUP)
OVERTIME_SECONDS = 5.0
"""How long after the exit deadline the process may still be there."""
REPORT_SECONDS = 2.0
"""How long after the exit deadline the reports of what could not be ended are waited for."""
SILENT_SECONDS = 5.0
"""An engine that has not turned for this long is not waited for: it may want a lock that the interrupted code holds."""
MAIN_THREAD_SECONDS = 2.0
"""How long the main thread may take to come to a handler."""
FLUSH_SECONDS = 1.0
"""How long the log's handlers may take at the end."""


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
    exit_timer.load()
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
    if not _signals_installed and settings.signals_on():
        _run_on_main_thread(_install_handlers)


def forget() -> None:
    """In a forked child: keep the parent's hooks from running here; arm our own on the next create."""
    global _end_everything, _leaving
    _end_everything = None
    _leaving = False
    _hear_no_more(in_child=True)


def _install_handlers() -> None:
    global _signals_installed
    if _signals_installed:
        return
    _signals_installed = True
    for number in HANDLED:
        with contextlib.suppress(ValueError, OSError):
            if signal.getsignal(number) is signal.SIG_DFL and not _is_caught(number):
                signal.signal(number, _on_signal)
    _hear_of_arrivals()


_arrivals: tuple[socket.socket, socket.socket] | None = None
"""Python writes the number of every signal that arrives to one of them, whatever the main thread does meanwhile."""


def _hear_of_arrivals() -> None:
    """Call it on the main thread. A program, or its event loop, that sets a wakeup descriptor of its own replaces this one."""
    global _arrivals
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if importlib.util.find_spec("trio") is not None:  # trio warns if a wakeup descriptor is already set
            return
        told, telling = threads.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told.setblocking(False)
        telling.setblocking(False)  # a signal handler must not wait
        told.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        before = signal.set_wakeup_fd(telling.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            told.close()
            telling.close()
            return
        _arrivals = told, telling
        loop = engine().loop
        loop.call_soon_threadsafe(loop.add_reader, told.fileno(), _arrived, told)


def _hear_no_more(*, in_child: bool = False) -> None:
    """Close the sockets, after the wakeup descriptor was reset: its number may become another file's."""
    global _arrivals
    if _arrivals is None:
        return
    told, telling = _arrivals
    try:
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, telling.fileno()):
            signal.set_wakeup_fd(current)
    except ValueError:  # not on the main thread
        return
    _arrivals = None
    telling.close()
    if in_child:  # else the engine does, which hears of it
        told.close()


def _arrived(told: socket.socket) -> None:
    """On the engine's loop. A child between its fork and its exec has our handlers, and tells of its own signals here."""
    with contextlib.suppress(BlockingIOError):
        while True:
            data, ancillary, _, _ = told.recvmsg(4096, socket.CMSG_SPACE(12))
            if not data:
                asyncio.get_running_loop().remove_reader(told.fileno())
                told.close()
                return
            here = any(struct.unpack("3i", sender)[0] == os.getpid() for _, _, sender in ancillary)
            if here and data[0] in HANDLED:
                in_background(_leave_without_main_thread(data[0]))


async def _leave_without_main_thread(number: int) -> None:
    await asyncio.sleep(MAIN_THREAD_SECONDS)
    if _leaving or _end_everything is None or signal.getsignal(number) is not _on_signal:
        return
    with contextlib.suppress(Exception):
        await asyncio.wait_for(_end_everything(failed=False), settings.seconds_at_exit() + REPORT_SECONDS)
    exit_timer.die_of(number)


def _is_caught(number: int) -> bool:
    """Whether a library has a handler that Python does not know: gevent's loop and `faulthandler` install theirs in C."""
    try:
        with open("/proc/self/status", "rb") as file:
            caught = next(line for line in file if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _leaving
    if not _leaving and _end_everything is not None:
        _leaving = True
        exit_timer.bound_signal(number, settings.seconds_at_exit() + OVERTIME_SECONDS)
        point("signal:begin")
        with contextlib.suppress(KeyboardInterrupt):  # a Ctrl+C on top: leave now
            _end_now(failed=False, hurry=threads.Event())
    # Die of the signal, as without us. A second signal during the clean-up comes here directly.
    exit_timer.die_of(number)


def _at_exit() -> None:
    if _end_everything is None:
        return
    _hear_no_more()
    with contextlib.suppress(KeyboardInterrupt):
        hurry = threads.Event()
        with (
            _interrupts_set(hurry),
            exit_timer.bound_exit(settings.seconds_at_exit() + OVERTIME_SECONDS),
        ):
            # sys.last_value is set when an exception ended the main thread: then the owner has failed.
            _end_now(failed=getattr(sys, "last_value", None) is not None, hurry=hurry)


@contextlib.contextmanager
def _interrupts_set(hurry: threads.Event) -> Iterator[None]:
    """A Ctrl+C meanwhile sets `hurry`, instead of raising in an exit hook, which Python would complain about.

    The next one ends the process, without a word: it is leaving already.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or not threads.is_main():
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if os.getpid() != 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        hurry.set()

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, before)


def _end_now(*, failed: bool, hurry: threads.Event) -> None:
    """End everything and wait, in the thread that is leaving. Never raises; never hangs."""
    if _end_everything is None or not started():
        return
    seconds = settings.seconds_at_exit()
    try:
        reports = engine().run_at_exit(
            _end_everything(failed=failed),
            seconds=seconds + REPORT_SECONDS,
            silent_seconds=SILENT_SECONDS,
            hurry=hurry,
        )
    except BaseException as error:
        # The rows are on disk, and the guardian ends what they stand for as soon as this process is gone.
        log.later(
            logging.WARNING, "could not destroy all sandboxes: %s; the guardian destroys the rest", error
        )
    else:
        left = [report for report in reports if report.outcome is Outcome.FAILED]
        if left:
            ids = ", ".join(str(report.sandbox_id) for report in left)
            log.later(
                logging.ERROR,
                "%d sandboxes could not be destroyed and stay in the ledger: %s; run: lowtide sweep",
                len(left),
                ids,
            )
    if not logger.flush(FLUSH_SECONDS):
        logger.let_go_of_handlers()


_pending: list[Any] = []


def _run_on_main_thread(action: Callable[[], None]) -> None:
    """Now if this is the main thread, else as soon as the main thread runs Python code again.

    Handlers can only be installed there. Until it happens the default action stays in force: the
    process dies of the signal at once and the guardian ends what it held.
    """
    if threads.is_main():
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
