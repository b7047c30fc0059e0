"""A bound on how long lowtide may keep a process from leaving, which nothing in the process can hold up.

An exit hook or a signal handler waits for the engine. Its wait has a deadline, but it is written in Python: it needs the
interpreter's lock, and whatever else has gone wrong may keep it. So a timer of the kernel's ends the process, a little
later than the wait should have, in the way in which the process was leaving. The guardian destroys what is left then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from lowtide import threads

_library: Any = None
_timers: list[Any] = []
_MONOTONIC = 1
_SIGNAL, _THREAD = 0, 2  # what a timer does: send a signal; call a function in a new thread


def load() -> None:
    """Make the timer usable, before the first create: a handler that interrupts an import must import nothing."""
    global _library
    if _library is None:
        _library = _Library() if sys.platform == "linux" else False


@contextlib.contextmanager
def bound_exit(seconds: float) -> Iterator[None]:
    """In an exit hook: where the body takes longer, the process ends with status 1.

    The body keeps to a bound of its own and returns, so that the interpreter leaves with the program's status. This is
    for a process that can no longer run Python. The program's own status cannot be read from outside the interpreter.
    """
    load()
    timer = _arm(seconds, exit_status=1)
    try:
        yield
    finally:
        _disarm(timer)


def bound_signal(number: int, seconds: float) -> None:
    """In a signal handler that ends with the process: after `seconds` it dies of the signal all the same.

    The signal's action is the default one from here on, so a second one ends the process at once.
    """
    if os.getpid() == 1:  # the kernel sends no deadly signal to the first process of its namespace
        _arm(seconds, exit_status=128 + number)
        return
    signal.signal(number, signal.SIG_DFL)
    _arm(seconds, number=number)


def die_of(number: int) -> None:
    """Leave as the signal would have it: by the signal, or as process 1 with the status that a shell gives it."""
    if os.getpid() != 1:
        if threads.is_main():
            signal.signal(number, signal.SIG_DFL)
        elif _library:
            _library.default_action(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(128 + number)


def _arm(seconds: float, *, number: int | None = None, exit_status: int | None = None) -> Any:
    if _library:
        timer = _library.start(seconds, number, exit_status)
        if timer is not None:
            return timer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not the right status, but an end
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return None


def _disarm(timer: Any) -> None:
    if timer is not None:
        _library.stop(timer)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Library:
    """The C library's timers."""

    def __init__(self) -> None:
        import ctypes

        class Event(ctypes.Structure):
            _fields_ = (
                ("value", ctypes.c_void_p),
                ("number", ctypes.c_int),
                ("kind", ctypes.c_int),
                ("function", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p),
                ("rest", ctypes.c_char * 64),
            )

        class Times(ctypes.Structure):
            _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "after", "after_ns"))

        self._ctypes, self._event, self._times = ctypes, Event, Times
        library = ctypes.CDLL(None)
        if not hasattr(library, "timer_create"):  # glibc before 2.34
            library = ctypes.CDLL("librt.so.1")
        self._create, self._set, self._delete = (
            library.timer_create,
            library.timer_settime,
            library.timer_delete,
        )
        # A thread that ends with the interpreter needs it, and the C library aborts a program that cannot load it then:
        # one that has changed its root directory.
        with contextlib.suppress(OSError):
            ctypes.CDLL("libgcc_s.so.1")
        self._signal = ctypes.CDLL(None).signal
        self._signal.argtypes, self._signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        self._exit = ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p)

    def start(self, seconds: float, number: int | None, exit_status: int | None) -> Any:
        """A timer that sends the signal or ends the process with the status; None where there is none to be had."""
        event = self._event()
        if number is not None:
            event.kind, event.number = _SIGNAL, number
        else:
            event.kind, event.function, event.value = _THREAD, self._exit.value, exit_status
        timer = self._ctypes.c_void_p()
        reference = self._ctypes.byref
        if self._create(_MONOTONIC, reference(event), reference(timer)) != 0:
            return None
        times = self._times(after=int(seconds), after_ns=max(1, int(seconds % 1 * 1e9)))
        if self._set(timer, 0, reference(times), None) != 0:
            return None
        return timer

    def default_action(self, number: int) -> None:
        """What `signal.signal` does on the main thread alone."""
        self._signal(number, None)

    def stop(self, timer: Any) -> None:
        self._delete(timer)
