"""The engine: one background thread with one event loop on which all of lowtide runs.

Everything is written async once and runs here; the sync face hands a coroutine over and waits. The
thread is a daemon, so that exit hooks can still use it while the interpreter shuts down, and a
forked child starts without it: it makes its own on first use and hangs on nothing of its parent's.

The loop is started again if something makes it return (a task that raises SystemExit, a library that stops it), so that
calls in progress continue. If the loop can no longer run, every call handed to it fails, and the next call gets a new
engine.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import selectors
import socket
import stat
import time
from asyncio.futures import _chain_future  # type: ignore[attr-defined]  # what run_coroutine_threadsafe uses
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lowtide import exit_timer, logger, threads
from lowtide.errors import SandboxError
from lowtide.threads import children_take_signals as children_take_signals

T = TypeVar("T")

AFTERWARDS_SECONDS = 5.0
"""How long the exit hooks of other libraries that lowtide has taken over may take together."""

log = logger.get("lowtide")

_lock = threads.Lock()
_engine: Engine | None = None
_forget_in_child: list[Callable[[], None]] = []
_last: list[Callable[[], object]] = []


def at_the_very_end(work: Callable[[], object]) -> None:
    """Take an exit hook of somebody else's over, to run it after lowtide has ended its sandboxes.

    What is registered later runs earlier: an SDK that is imported with the first sandbox would stop first.
    """
    atexit.unregister(work)
    if work not in _last:
        _last.append(work)


def _at_the_very_end() -> None:
    if not _last:
        return
    with exit_timer.bound_exit(AFTERWARDS_SECONDS):
        while _last:
            _last.pop()()


atexit.register(_at_the_very_end)  # with this import, which comes before any lease's own hook


class Engine:
    """The loop and its thread. Get it with `engine()`."""

    def __init__(self) -> None:
        logger.start()
        self.loop: asyncio.AbstractEventLoop
        self._workers = _Workers()
        self._workers.have(1)
        self._thread: int | None = None
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        self._shielded: set[asyncio.Task[Any]] = set()
        self._ended = False
        made: threads.SimpleQueue[BaseException | None] = threads.SimpleQueue()
        threads.start(lambda: self._run(made.put), "lowtide")
        error = (
            made.get()
        )  # in a patched process all greenlets of the thread wait: another one would want `_lock`
        if error is not None:
            raise error

    def _run(self, made: Callable[[BaseException | None], object]) -> None:
        self._thread = threads.get_ident()
        try:
            self.loop = threads.new_event_loop()  # here: asyncio logs that, and a handler may raise
            self.loop.set_exception_handler(_log_unhandled)
            self.loop.slow_callback_duration = float("inf")  # its debug mode would log from the loop itself
            self.loop.set_default_executor(self._workers)
            asyncio.set_event_loop(self.loop)
        except BaseException as error:
            made(error)
            return
        made(None)
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
                why = "something stopped it"
            except OSError as error:  # of its selector: no callback's error comes here
                log.error(
                    "lowtide's event loop can no longer wait for events (%s): did the program close descriptors that are not its "
                    "own? Calls under way fail; the guardian destroys what this process holds when it ends",
                    error,
                )
                break
            except BaseException as error:
                why = f"{type(error).__name__}: {error}"
            log.error("lowtide's event loop stopped and is started again: %s", why)
            # A loop that stops again at once must not use up a processor.
            threads.Event().block(0.01)
        self._give_up()

    def _give_up(self) -> None:
        """Fail every call in progress: the loop that would complete them no longer runs."""
        global _engine
        self._ended = True
        if _engine is self:
            _engine = None
        for future in list(self._under_way):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(_ended())

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop, from any thread."""
        return self._hand_over(
            work, lambda future: _chain_future(asyncio.ensure_future(work, loop=self.loop), future)
        )

    def submit_shielded(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop, from any thread. Cancelling the future only abandons the wait: `work` runs to its end.

        `submit` passes a cancellation on, and one that arrives before the loop has taken up `work` drops it unstarted.
        """

        def begin(future: concurrent.futures.Future[T]) -> None:
            task = self.loop.create_task(work)
            self._shielded.add(task)  # the loop itself only holds tasks weakly
            task.add_done_callback(self._shielded.discard)
            task.add_done_callback(lambda done: _pass_on(done, future))

        return self._hand_over(work, begin)

    def _hand_over(
        self, work: Coroutine[Any, Any, T], begin: Callable[[concurrent.futures.Future[T]], object]
    ) -> concurrent.futures.Future[T]:
        future: threads.Future[T] = threads.Future()

        def on_loop() -> None:
            try:
                begin(future)
            except BaseException as error:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)

        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        try:
            self.loop.call_soon_threadsafe(on_loop)
        except RuntimeError as error:  # closed
            work.close()
            raise _ended() from error
        if self._ended:
            self._give_up()
        return future

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run `work` and wait for it. Not from the engine's own thread: that would wait for itself."""
        if self.is_current_thread():
            work.close()
            raise RuntimeError(
                "a blocking lowtide call was made on lowtide's own event loop; await it instead"
            )
        return self.submit(work).result(timeout)

    def run_at_exit(
        self, work: Coroutine[Any, Any, T], *, seconds: float, silent_seconds: float, hurry: threads.Event
    ) -> T:
        """Run `work` from a signal handler or an exit hook, and wait for it without any lock but this call's own.

        Raises TimeoutError after `seconds`, at once when `hurry` is set, and when the loop has not turned for
        `silent_seconds`: it may wait for a lock that the interrupted code holds.
        """
        turned = time.monotonic()
        deadline = turned + seconds

        async def turn() -> None:
            nonlocal turned
            while True:
                turned = time.monotonic()
                await asyncio.sleep(0.1)

        future, turning = self.submit(work), self.submit(turn())
        future.add_done_callback(lambda _: hurry.set())
        try:
            while not hurry.block(0.25):
                now = time.monotonic()
                if now > deadline:
                    raise TimeoutError(f"not done within {seconds:g} s")
                if now - turned > silent_seconds:
                    raise TimeoutError(f"lowtide's event loop has not turned for {silent_seconds:g} s")
            if not future.done():
                raise TimeoutError("interrupted")
            return future.result(0)
        finally:
            turning.cancel()

    def have_workers(self, count: int) -> None:
        """Have threads for so many blocking calls at once, so that an exit hook, which can start none, finds them."""
        self._workers.have(count)

    def is_current_thread(self) -> bool:
        return threads.get_ident() == self._thread


def _ended() -> SandboxError:
    return SandboxError(
        "lowtide's event loop was closed while this call was under way, so its outcome is unknown. Sandboxes that this "
        "process owns are destroyed when it exits; `lowtide ls` shows them"
    )


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio would log from the loop's own thread."""
    logger.enqueue(lambda: loop.default_exception_handler(context))


def _pass_on(task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
    """Give `future` the outcome of `task`, unless its caller has cancelled it."""
    error = (
        None if task.cancelled() else task.exception()
    )  # retrieved in any case, so that asyncio does not log it
    if task.cancelled():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def engine() -> Engine:
    """The process's engine, started on first use."""
    global _engine
    running = _engine
    if running is None:
        with _lock:
            if _engine is None:
                _engine = Engine()
            running = _engine
    return running


def started() -> bool:
    return _engine is not None


def forget_in_child(action: Callable[[], None]) -> None:
    """Run `action` in every forked child: drop state that belongs to the parent, close its descriptors."""
    _forget_in_child.append(action)


def _reset_after_fork() -> None:
    global _engine, _lock
    parents, _engine = _engine, None
    if parents is not None:
        _part(parents.loop)
    _lock = threads.Lock()
    for action in _forget_in_child:
        action()


def _part(loop: asyncio.AbstractEventLoop) -> None:
    """In a child: nothing that it lets go of, or closes, is heard by its parent's loop or at the parent's connections."""
    selector = getattr(loop, "_selector", None)
    if selector is None:
        return
    nowhere, other = threads.socketpair()
    other.close()
    for descriptor in list(selector.get_map() or ()):
        # Its connections are the child's, too: an SDK's that is let go of here says goodbye in TLS, and the
        # other side closes it for both. So the child's copies lead nowhere.
        with contextlib.suppress(OSError):
            if _is_connection(descriptor):
                os.dup2(nowhere.fileno(), descriptor, inheritable=False)
    nowhere.close()
    # Both share one epoll instance: whatever the child took off it the parent's loop would not hear of any
    # more. Closing the child's end of it is safe; what still asks for it finds one that knows nothing.
    selector.close()
    vars(loop)["_selector"] = selectors.SelectSelector()
    loop.set_exception_handler(lambda *_: None)  # that they were never closed is not news


def _is_connection(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with threads.Socket(fileno=os.dup(descriptor)) as same:
        return same.family in (socket.AF_INET, socket.AF_INET6)


os.register_at_fork(after_in_child=_reset_after_fork)


class _Workers(concurrent.futures.ThreadPoolExecutor):
    """Threads for blocking calls that keep working in exit hooks.

    The standard pool refuses work as soon as the interpreter starts to shut down, which is exactly
    when sandboxes have to be ended. From Python 3.12 on no thread can be started then either: what an
    exit needs is started before (`have`), the first one with the engine.
    """

    _most = 32

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._waiting: threads.SimpleQueue[Callable[[], None]] = threads.SimpleQueue()
        self._idle = threads.Semaphore(0)
        self._count = 0
        self._count_lock = threads.Lock()

    def have(self, count: int) -> None:
        """At least so many threads, up to the most there can be."""
        while self._count < min(count, self._most) and self._start():
            pass

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: threads.Future[T] = threads.Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._waiting.put(work)
        if not self._idle.acquire(blocking=False):
            self._start()  # or, where none can be started, one of those there are comes to it
        return future

    def _start(self) -> bool:
        with self._count_lock:
            if self._count >= self._most:
                return False
            try:
                threads.start(self._serve)
            except RuntimeError:  # the interpreter is shutting down, or the machine has no thread left
                if self._count:
                    return False
                raise
            self._count += 1
            return True

    def _serve(self) -> None:
        while True:
            try:
                work = self._waiting.get_nowait()
            except threads.Empty:
                self._idle.release()
                work = self._waiting.get()
            work()
