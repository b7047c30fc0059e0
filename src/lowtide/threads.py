"""Real threads, locks between them, and what they call, that nothing in the program can take away.

The engine and its helpers run in threads of their own. Two things could stop them:

* gevent's ``monkey.patch_all()`` replaces threads by greenlets and locks by the locks of one hub. An engine "thread"
  would then be a greenlet on the main thread, and a lock that two real threads share could wait for ever. It also makes
  every socket non-blocking, for the process at its other end, too, and lets only the main thread start processes. So
  this module takes the functions that the patch has replaced. eventlet's patch cannot be told apart that far: see
  `check_supported`.
* A signal handler runs on top of interrupted code, which may hold a lock of the standard library (`threading` has one
  that every ``Thread.start()`` takes). So threads are started with the interpreter's own function, without that lock.
"""

from __future__ import annotations

import _socket
import _thread
import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from _queue import Empty as Empty
from _queue import SimpleQueue as SimpleQueue
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lowtide.errors import UnsupportedError

T = TypeVar("T")

MAIN_THREADS_SIGNALS = frozenset(
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
"""Signals that programs handle in Python. The kernel may deliver a process's signal to any thread that does not block
it, but Python runs handlers on the main thread only: delivered to one of ours, it would wait until that thread wakes."""


def patched_by() -> str | None:
    """``"gevent"`` or ``"eventlet"`` where one of them has replaced the threads of this process, else None."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return "gevent"
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        return "eventlet"
    return None


def check_supported(provider: str, own_threads: bool) -> None:
    """Before a create. Raises UnsupportedError where sandboxes would be left behind, or the call would never return.

    `own_threads`: whether the provider's SDK starts some, which are greenlets after gevent's patch.
    """
    library = patched_by()
    if library == "eventlet":
        raise UnsupportedError(
            "lowtide cannot work in a process that eventlet.monkey_patch() has changed: its sockets, pipes and processes "
            "belong to eventlet's hub, which lowtide's own threads cannot use. Use gevent or plain threads (for gunicorn: "
            "-k gevent or -k gthread), or call lowtide in a process of its own",
            provider=provider,
            feature="eventlet",
            alternative="gevent or threads",
        )
    if library == "gevent" and own_threads:
        raise UnsupportedError(
            f"{provider} cannot be used in a process that gevent.monkey.patch_all() has changed: its SDK runs threads of "
            "its own, and would wait for ever. Patch with thread=False, use plain threads (for gunicorn: -k gthread), or "
            "call lowtide in a process of its own",
            provider=provider,
            feature="gevent",
            alternative="thread=False or threads",
        )
    if library == "gevent":  # a program may patch after the engine has begun
        _keep_own_closes_from_hub()


def _original(module: str, name: str) -> Any:
    """The standard library's own function, from whichever library has put another in its place."""
    library = patched_by()
    if library == "gevent":
        return sys.modules["gevent.monkey"].get_original(module, name)
    if library == "eventlet":
        return getattr(sys.modules["eventlet.patcher"].original(module), name)
    return getattr(sys.modules[module], name)


_start_new_thread: Callable[..., int] = _original("_thread", "start_new_thread")
get_ident: Callable[[], int] = _original("_thread", "get_ident")
Lock: Callable[[], _thread.LockType] = _original("_thread", "allocate_lock")
"""A lock of the interpreter. Waiting for one stops the whole thread, greenlets included: hold it for a moment only."""
RLock: Callable[[], Any] = _thread.RLock
Socket: type[socket.socket] = _original("socket", "socket")
posix_spawn: Callable[..., int] = _original("os", "posix_spawn")
select_ready = _original("select", "select")
poll: Callable[[], select.poll] = _original("select", "poll")
_getaddrinfo: Callable[..., Any] = _original("socket", "getaddrinfo")
_close_at_once: Callable[[int], None] = _original("os", "close")
_close_in_hub = _close_at_once

_own: set[int] = set()


def start(work: Callable[[], object], name: str | None = None) -> None:
    """Run `work` in a real daemon thread that takes none of the main thread's signals.

    `name` is what debuggers show. Only for threads that are started before the first create: giving a thread its name
    takes `threading`'s lock, which interrupted code may hold for ever. Raises RuntimeError where no thread can be
    started: from Python 3.12 on while the interpreter shuts down.
    """

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, MAIN_THREADS_SIGNALS)
        me = get_ident()
        _own.add(me)
        try:
            if (trace := threading.gettrace()) is not None:
                sys.settrace(trace)
            if name is not None and patched_by() is None:
                threading.current_thread().name = name
            work()
        except BaseException:  # no caller could get it, and the interpreter would print it
            return
        finally:
            _own.discard(me)

    if patched_by() == "gevent":
        _keep_own_closes_from_hub()
    _start_new_thread(run, ())


def is_own() -> bool:
    """Whether the caller runs in a thread that `start` has started."""
    return get_ident() in _own


def is_main() -> bool:
    """Whether the caller runs in the main thread, in whichever greenlet."""
    if sys.platform == "linux":
        return _thread.get_native_id() == os.getpid()
    return threading.current_thread() is threading.main_thread()


def _keep_own_closes_from_hub() -> None:
    """Make `os.close` close at once in the threads that `start` has started.

    gevent's leaves the closing to the hub of the calling thread. None of these threads runs its hub: the descriptor would
    stay open for ever, and the next one of that number could not be closed.
    """
    global _close_in_hub
    if os.close not in (_close, _close_at_once):
        _close_in_hub, os.close = os.close, _close


def _close(fd: int) -> None:
    close = _close_at_once if is_own() else _close_in_hub
    close(fd)


_SIGNAL_CHECK_SECONDS = 0.5
"""How late the main thread may notice a signal that did not interrupt its wait."""


class Event:
    """A flag that threads, and greenlets of a patched process, can wait for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_set = False
        self._wake: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._lock:
            self._is_set = True
            wake, self._wake = self._wake, []
        for one in wake:
            one()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set within `timeout` seconds. A greenlet lets the others of its thread run meanwhile."""
        if self._is_set:
            return True
        greenlets = _waits_with_others()
        if greenlets is not None:
            return self._wait_in_greenlet(greenlets, timeout)
        return self.block(timeout)

    def block(self, timeout: float | None = None) -> bool:
        """The same, and the whole thread waits: for signal handlers and exit hooks."""
        waiter = Lock()
        waiter.acquire()
        with self._lock:
            if self._is_set:
                return True
            self._wake.append(waiter.release)
        deadline = None if timeout is None else time.monotonic() + max(0.0, timeout)
        # CPython runs signal handlers on the main thread. It runs none for a signal that arrives between its last check
        # and this wait, until the wait is over: so the main thread waits in short steps.
        longest = _SIGNAL_CHECK_SECONDS if is_main() else threading.TIMEOUT_MAX
        while True:
            left = longest if deadline is None else min(longest, max(0.0, deadline - time.monotonic()))
            if waiter.acquire(timeout=left) or (deadline is not None and time.monotonic() >= deadline):
                return self._is_set

    def _wait_in_greenlet(self, readable: Callable[[int, float | None], bool], timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting, waking = os.pipe()
        is_open, guard = True, Lock()

        def wake() -> None:
            with guard:
                if is_open:
                    os.write(waking, b"\0")

        try:
            with self._lock:
                if self._is_set:
                    return True
                self._wake.append(wake)
            while not self._is_set:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not readable(waiting, left):
                    break
            return self._is_set
        finally:
            with guard:
                is_open = False
                os.close(waiting)
                os.close(waking)


class Semaphore:
    """A count of permits, between real threads."""

    def __init__(self, value: int) -> None:
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(value):
            self._permits.put(None)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        try:
            self._permits.get(blocking, timeout)
        except Empty:
            return False
        return True

    def release(self) -> None:
        self._permits.put(None)


class Future(concurrent.futures.Future[T]):
    """A future that is settled in one real thread and waited for in another, or in a greenlet."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(RLock())

    def result(self, timeout: float | None = None) -> T:
        self._settled(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._settled(timeout)
        return super().exception(0)

    def _settled(self, timeout: float | None) -> None:
        if self.done():
            return
        settled = Event()
        self.add_done_callback(lambda _: settled.set())
        if not settled.wait(timeout):
            raise TimeoutError


def _waits_with_others() -> Callable[[int, float | None], bool] | None:
    """How this greenlet waits for a descriptor while others run; None where the caller is no greenlet of a hub."""
    library = patched_by()
    if library is None or is_own():
        return None
    if library == "gevent":
        hub_of_thread: Any = sys.modules["gevent.hub"]
        hub = hub_of_thread.get_hub()
        if hub_of_thread.getcurrent() is hub:  # a signal handler, or a callback of the hub's own
            return None
        return _readable_in_gevent
    hubs: Any = sys.modules["eventlet.hubs"]
    if sys.modules["greenlet"].getcurrent() is hubs.get_hub().greenlet:
        return None
    return _readable_in_eventlet


def _readable_in_gevent(descriptor: int, timeout: float | None) -> bool:
    from gevent.socket import wait_read

    try:
        wait_read(descriptor, timeout=timeout, timeout_exc=TimeoutError())
    except TimeoutError:
        return False
    return True


def _readable_in_eventlet(descriptor: int, timeout: float | None) -> bool:
    trampoline = sys.modules["eventlet.hubs"].trampoline
    try:
        trampoline(descriptor, read=True, timeout=timeout, timeout_exc=TimeoutError)
    except TimeoutError:
        return False
    return True


class _Epoll(selectors.BaseSelector):
    """The kernel's own, for an event loop in a real thread of a patched process, whose `selectors` wait for a hub."""

    def __init__(self) -> None:
        self._epoll = _original("select", "epoll")()
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = _descriptor(fileobj)
        if descriptor in self._keys:
            raise KeyError(f"{fileobj!r} is already registered")
        key = selectors.SelectorKey(fileobj, descriptor, events, data)
        self._epoll.register(descriptor, _interest(events))
        self._keys[descriptor] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._keys.pop(_descriptor(fileobj))
        with contextlib.suppress(OSError):  # closed before
            self._epoll.unregister(key.fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = _descriptor(fileobj)
        key = self._keys[descriptor] = self._keys[descriptor]._replace(events=events, data=data)
        self._epoll.modify(descriptor, _interest(events))
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = []
        for descriptor, event in self._epoll.poll(-1 if timeout is None else max(0.0, timeout)):
            key = self._keys.get(descriptor)
            if key is not None:
                happened = (selectors.EVENT_WRITE if event & ~_READ else 0) | (
                    selectors.EVENT_READ if event & ~_WRITE else 0
                )
                if happened & key.events:
                    ready.append((key, happened & key.events))
        return ready

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_descriptor(fileobj)]

    def get_map(self) -> Any:
        return self._keys

    def close(self) -> None:
        self._epoll.close()
        self._keys.clear()


_READ, _WRITE = 1, 4  # EPOLLIN, EPOLLOUT


def _interest(events: int) -> int:
    return (_READ if events & selectors.EVENT_READ else 0) | (_WRITE if events & selectors.EVENT_WRITE else 0)


def _descriptor(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())


def new_event_loop() -> Any:
    """An asyncio event loop for a real thread."""
    import asyncio

    if patched_by() is None:
        return asyncio.new_event_loop()

    class Loop(asyncio.SelectorEventLoop):
        async def getaddrinfo(
            self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
        ) -> Any:
            return await self.run_in_executor(None, _getaddrinfo, host, port, family, type, proto, flags)

    return Loop(_Epoll())


def socketpair(
    family: int = socket.AF_UNIX, kind: int = socket.SOCK_STREAM
) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that block, at both ends, unless told otherwise."""
    one, other = _socket.socketpair(family, kind)
    return Socket(family, kind, 0, one.detach()), Socket(family, kind, 0, other.detach())


def run_process(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, from any thread."""
    if patched_by() is None:
        return subprocess.run(command, **how)
    try:
        done: subprocess.CompletedProcess[Any] = _unpatched_subprocess().run(command, **how)
    except Exception as error:
        if type(error).__name__ == "TimeoutExpired":
            raise subprocess.TimeoutExpired(command, how.get("timeout", 0.0)) from error
        raise
    return done


@functools.cache
def _unpatched_subprocess() -> Any:
    """A second copy of the module: the patch has replaced what the functions of the first one use."""
    spec = importlib.util.find_spec("subprocess")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def children_take_signals() -> Iterator[None]:
    """Around every start of a process on one of these threads: the process would inherit their signal mask."""
    masked = signal.pthread_sigmask(signal.SIG_UNBLOCK, MAIN_THREADS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _reset_after_fork() -> None:
    _own.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
