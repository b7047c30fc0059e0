"""What lowtide logs, without ever waiting for the program's log handlers or failing because of them.

A log handler takes a lock, and may block or raise. The engine's threads must not: a signal handler may have interrupted
the main thread inside a handler, with its lock held, and would wait for the engine while the engine waited for the lock.
So what the engine's threads log goes through a bounded queue to a thread that does nothing else. Other threads
log directly, and exceptions of handlers are dropped: a full disk must not fail a `stop()`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from lowtide import threads

QUEUED_LINES = 10_000
"""What may wait for a handler that blocks. Later lines are dropped and counted."""
# fmt: off
SDKS = frozenset({
    "aiodocker", "asyncio", "cwsandbox", "daytona", "e2b", "grpc", "grpclib", "h2", "hpack", "kubernetes", "modal",
    "modal-client", "pyqwest", "runloop_api_client", "synchronicity",
})
"""Whose loggers are used on the engine's threads, or on threads of their own, by the first word of their names."""
LIBRARIES = SDKS | {
    "aiohttp", "anyio", "httpcore", "httpcore2", "httpx", "httpx2", "urllib3", "websockets",
}
"""The same, and those that a program uses on its own threads as well."""
# fmt: on

_queue: threads.SimpleQueue[Callable[[], object]] = threads.SimpleQueue()
_numbers = itertools.count(1)
_queued = _emitted = _dropped = 0
_drainer: int | None = None
"""The thread that logs. Without one there is no engine either, whose lines would have to wait."""
_late = False
"""Whether a handler has made a caller wait, and still blocks."""


def get(name: str) -> Log:
    """The logger of that name, as lowtide uses it."""
    return Log(name)


class Log:
    """Writes to the standard library's logger of the same name. Never raises; never blocks the engine."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def debug(self, message: str, *arguments: Any, exc_info: BaseException | None = None) -> None:
        error = None if exc_info is None else (type(exc_info), exc_info, exc_info.__traceback__)
        self._say(logging.DEBUG, message, arguments, error)

    def info(self, message: str, *arguments: Any) -> None:
        self._say(logging.INFO, message, arguments)

    def warning(self, message: str, *arguments: Any) -> None:
        self._say(logging.WARNING, message, arguments)

    def error(self, message: str, *arguments: Any) -> None:
        self._say(logging.ERROR, message, arguments)

    def exception(self, message: str, *arguments: Any) -> None:
        self._say(logging.ERROR, message, arguments, sys.exc_info())

    def later(self, level: int, message: str, *arguments: Any) -> None:
        """Say it in the thread for that, also from another thread: for signal handlers and finalizers."""
        self._say(level, message, arguments, queued=True)

    def _say(
        self, level: int, message: str, arguments: tuple[Any, ...], error: Any = None, queued: bool = False
    ) -> None:
        frame = sys._getframe(2)
        place = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        said = time.time()

        def emit(thread: str | None = None) -> None:
            logger = logging.getLogger(self.name)
            if not logger.isEnabledFor(level):
                return
            record = logger.makeRecord(
                self.name, level, place[0], place[1], message, arguments, error, place[2]
            )
            if thread is not None:
                record.relativeCreated -= (record.created - said) * 1000
                record.created, record.msecs, record.threadName = said, said % 1 * 1000, thread
            logger.handle(record)

        if (queued or threads.is_own()) and _drainer is not None:
            enqueue(lambda: emit("lowtide"))
            return
        try:
            emit()
        except Exception:  # the program's handler, not ours
            return


def enqueue(emit: Callable[[], object]) -> None:
    """Call `emit` in the thread that logs, after what was said before."""
    global _queued, _dropped
    if _queue.qsize() >= QUEUED_LINES:
        _dropped += 1
        return
    _queued = next(_numbers)
    _queue.put(emit)


def start() -> None:
    """Have the thread that logs, before anything is created: an exit hook could not start it."""
    global _drainer
    if _drainer is None:
        _drainer = 0
        threads.start(_drain, "lowtide-log")
        _divert_libraries()


def flush(seconds: float) -> bool:
    """Wait until every line logged so far has reached its handlers. False if that takes longer than `seconds`.

    A handler that blocks makes one caller wait and no other: as long as it blocks, this returns at once.
    """
    global _late
    if _queued <= _emitted or _drainer is None or threads.is_own():
        return True
    if _late:
        return False
    reached = threads.Event()
    _queue.put(reached.set)
    if reached.block(seconds):
        return True
    _late = True
    return False


def let_go_of_handlers() -> None:
    """At exit, if a handler blocks: keep the interpreter from waiting for its lock.

    `logging.shutdown()`, an exit hook like ours, would wait for ever for the lock that the thread that logs holds. So would
    a flush of the stream that it writes to, if that is a full pipe: by that exit hook, or by the interpreter for stderr.
    """
    handlers = getattr(logging, "_handlerList", [])
    for reference in list(handlers):
        handler = reference()
        lock = getattr(handler, "lock", None)
        if lock is None or lock.acquire(blocking=False):
            if lock is not None:
                lock.release()
            continue
        handler.lock = threads.RLock()
        if isinstance(handler, logging.StreamHandler):
            handlers.remove(reference)
            if handler.stream in (sys.stderr, sys.__stderr__):
                _replace_stderr(handler.stream)


_abandoned: list[Any] = []
"""Streams that a thread holds the lock of: to let go of one would flush it."""


def _replace_stderr(stuck: Any) -> None:
    """The same file under a lock of its own. What the program writes to stderr from here on goes there."""
    _abandoned.append(stuck)
    with contextlib.suppress(Exception):  # it has no descriptor
        fresh = open(  # noqa: SIM115 - for as long as the process lasts
            stuck.fileno(), "w", buffering=1, encoding=stuck.encoding, errors=stuck.errors, closefd=False
        )
        sys.stderr = sys.__stderr__ = fresh  # type: ignore[misc]


def _drain() -> None:
    global _drainer, _emitted, _dropped, _late
    _drainer = threads.get_ident()
    while True:
        emit = _queue.get()
        with contextlib.suppress(BaseException):  # a handler that raises loses its line, and no other
            emit()
        if not isinstance(getattr(emit, "__self__", None), threads.Event):
            _emitted += 1
        _late = False
        if _dropped:
            dropped, _dropped = _dropped, 0
            with contextlib.suppress(BaseException):
                logging.getLogger("lowtide").warning(
                    "%d lines of lowtide's log were dropped: a log handler blocks", dropped
                )


class _Divert(logging.Filter):
    """On a library's logger: records from lowtide's threads are emitted by the thread that logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        if threads.get_ident() == _drainer or _drainer is None:
            return True
        ours = threads.is_own() or (record.name.partition(".")[0] in SDKS and not threads.is_main())
        if ours:
            enqueue(lambda: logging.getLogger(record.name).handle(record))
        return not ours


_divert = _Divert()


class _Loggers(dict[str, Any]):
    """The standard library's table of loggers: an SDK makes its own when it is loaded, long after the engine has begun."""

    def __setitem__(self, name: str, logger: Any) -> None:
        super().__setitem__(name, logger)
        if name.partition(".")[0] in LIBRARIES and isinstance(logger, logging.Logger):
            logger.addFilter(_divert)


def _divert_libraries() -> None:
    manager = logging.root.manager
    with logging._lock:  # type: ignore[attr-defined]
        if not isinstance(manager.loggerDict, _Loggers):
            diverted = _Loggers()
            for name, logger in manager.loggerDict.items():
                diverted[name] = logger
            manager.loggerDict = diverted


def _forget() -> None:
    """In a forked child: the thread that logs is the parent's."""
    global _queue, _numbers, _queued, _emitted, _dropped, _drainer, _late
    _queue, _numbers = threads.SimpleQueue(), itertools.count(1)
    _queued = _emitted = _dropped = 0
    _drainer, _late = None, False


os.register_at_fork(after_in_child=_forget)
