"""The engine: one background thread with one event loop on which all of lowtide runs.

Everything is written async once and runs here; the sync face hands a coroutine over and waits. The
thread is a daemon, so that exit hooks can still use it while the interpreter shuts down, and a
forked child starts without it: it makes its own on first use and hangs on nothing of its parent's.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import queue
import selectors
import signal
import socket
import stat
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# What programs handle in Python. The kernel may hand a signal for the process to any thread that takes it, but
# Python runs handlers on the main thread only: taken by one of ours it would wait until that one wakes by itself.
_MAIN_THREADS = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    }
)

_lock = threading.Lock()
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
    while _last:
        _last.pop()()


atexit.register(_at_the_very_end)  # with this import, which comes before any lease's own hook


class Engine:
    """The loop and its thread. Get it with `engine()`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._workers = _Workers()
        self._workers.have(1)
        self.loop.set_default_executor(self._workers)
        self._shielded: set[asyncio.Task[Any]] = set()
        self.thread = threading.Thread(target=self._run, name="lowtide", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _MAIN_THREADS)  # threads started from here inherit it
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run `work` and wait for it. Not from the engine's own thread: that would wait for itself."""
        if self.is_current_thread():
            work.close()
            raise RuntimeError(
                "a blocking lowtide call was made on lowtide's own event loop; await it instead"
            )
        return self.submit(work).result(timeout)

    def submit_shielded(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop, from any thread. Cancelling the future only abandons the wait: `work` runs to its end.

        `submit` passes a cancellation on, and one that arrives before the loop has taken up `work` drops it unstarted.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def begin() -> None:
            task = self.loop.create_task(work)
            self._shielded.add(task)  # the loop itself only holds tasks weakly
            task.add_done_callback(self._shielded.discard)
            task.add_done_callback(lambda done: _pass_on(done, future))

        self.loop.call_soon_threadsafe(begin)
        return future

    def have_workers(self, count: int) -> None:
        """Have threads for so many blocking calls at once, so that an exit hook, which can start none, finds them."""
        self._workers.have(count)

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self.thread


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


@contextlib.contextmanager
def children_take_signals() -> Iterator[None]:
    """Around every start of a process on one of the engine's threads: it would inherit their signal mask."""
    masked = signal.pthread_sigmask(signal.SIG_UNBLOCK, _MAIN_THREADS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


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
    _lock = threading.Lock()
    for action in _forget_in_child:
        action()


def _part(loop: asyncio.AbstractEventLoop) -> None:
    """In a child: nothing that it lets go of, or closes, is heard by its parent's loop or at the parent's connections."""
    selector = getattr(loop, "_selector", None)
    if selector is None:
        return
    nowhere, other = socket.socketpair()
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
    with socket.socket(fileno=os.dup(descriptor)) as same:
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
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0
        self._count_lock = threading.Lock()

    def have(self, count: int) -> None:
        """At least so many threads, up to the most there can be."""
        while self._count < min(count, self._most) and self._start():
            pass

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

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
                threading.Thread(target=self._serve, name="lowtide-worker", daemon=True).start()
            except RuntimeError:  # the interpreter is shutting down, or the machine has no thread left
                if self._count:
                    return False
                raise
            self._count += 1
            return True

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _MAIN_THREADS)  # started from any thread
        while True:
            try:
                work = self._waiting.get_nowait()
            except queue.Empty:
                self._idle.release()
                work = self._waiting.get()
            work()
