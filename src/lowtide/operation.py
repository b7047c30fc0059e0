"""Operation: a started call, awaited in async code and asked for its `.result()` in sync code."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, overload

from lowtide import loops
from lowtide.errors import SandboxError, SandboxGone, SandboxTimeoutError, ValidationError

if TYPE_CHECKING:
    import concurrent.futures

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_generation = 0
_LOG_SECONDS = 0.2


def generation() -> int:
    """Differs between a process and its forked children: what one started, the other must not wait for."""
    return _generation


def _count_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)


class Audience:
    """Who waits for a thing that must not outlive the last of them who gives up before anybody got it.

    A waiter that is cancelled in the instant after the thing was there has not got it either.
    """

    def __init__(self, given_up: Callable[[], None]) -> None:
        self._given_up = given_up
        self._waiting: set[object] = set()
        self._delivered = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits; to leave this normally is to have got it."""
        waiter = object()
        self._waiting.add(waiter)
        try:
            yield
            self._delivered = True
        finally:
            self._waiting.discard(waiter)

    def leave(self) -> None:
        """Somebody was cancelled, or has cancelled."""
        if not self._waiting and not self._delivered:
            self._given_up()


class Operation(Coroutine[Any, Any, T_co]):
    """A call that is already under way on lowtide's own loop.

    ``op.result()`` waits for it in any thread; ``await op`` waits for it in any event loop, asyncio's or trio's. Cancelling
    the waiting task cancels the operation. An operation that nobody waits for still happens; when it fails and nobody
    has ever asked, the log says so once. It is a coroutine, too: ``asyncio.create_task(op)`` and task groups take it.
    """

    _kind: type[concurrent.futures.Future[Any]] | None = None
    """Of the futures there were: at the interpreter's very end nothing can be imported any more."""
    _heard = False
    _steps: dict[Any, Generator[Any, None, T_co]] | None = None

    def __init__(self, future: concurrent.futures.Future[T_co], audience: Audience | None = None) -> None:
        if Operation._kind is None:
            Operation._kind = type(future)
        self._future = future
        self._audience = audience
        self._generation = _generation

    def _heard_by(self) -> Callable[[], None]:
        """What tells that somebody was raised its failure elsewhere, in a stream. It holds nothing."""
        this = weakref.ref(self)

        def heard() -> None:
            operation = this()
            if operation is not None:
                operation._heard = True

        return heard

    def _unasked(self) -> Operation[T_co]:
        """One whose failure shows elsewhere."""
        self._heard = True
        return self

    @classmethod
    def start(
        cls, work: Coroutine[Any, Any, T], *, audience: Audience | None = None, shielded: bool = False
    ) -> Operation[T]:
        """Start `work` on the engine's loop; `audience` counts who waits for what it brings.

        `shielded`: cancelling the operation, or the task that awaits it, does not cancel `work`. Every end of a
        sandbox is started this way.
        """
        from lowtide.engine import engine

        return Operation(engine().submit_shielded(work) if shielded else engine().submit(work), audience)

    @classmethod
    def over(cls, value: T) -> Operation[T]:
        """One that is done already, without the engine."""
        if Operation._kind is None:
            from concurrent.futures import Future

            Operation._kind = Future
        future: concurrent.futures.Future[T] = Operation._kind()
        future.set_result(value)
        return Operation(future)

    def result(self, timeout: float | None = None) -> T_co:
        """Wait and return what it came to, or raise what it raised.

        Raises SandboxTimeoutError (a TimeoutError) when `timeout` seconds were not enough; the
        operation goes on then. Raises ``concurrent.futures.CancelledError`` when it was cancelled.
        """
        timeout = _timeout(timeout)
        self._heard = True
        self._check_waitable()
        try:
            if self._audience is None:
                return self._wait_in_thread(timeout)
            with self._audience.waiting():
                return self._wait_in_thread(timeout)
        except TimeoutError:
            if self._future.done():
                raise  # its own
        raise SandboxTimeoutError(f"not done after {timeout} seconds; it goes on, cancel() would end it")

    def _wait_in_thread(self, timeout: float | None) -> T_co:
        try:
            return self._future.result(timeout)
        finally:
            # Show what the call has logged before the caller continues. A handler that blocks delays only one call.
            if (logger := sys.modules.get("lowtide.logger")) is not None:
                logger.flush(_LOG_SECONDS)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return what it raised, or None. SandboxTimeoutError as in `result`."""
        timeout = _timeout(timeout)
        self._heard = True
        self._check_waitable()
        try:
            return self._future.exception(timeout)
        except TimeoutError:
            raise SandboxTimeoutError(f"not done after {timeout} seconds; it goes on") from None

    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        self._check_process()
        return self._future.done()

    def _has_failed(self) -> bool:
        """Whether the call itself raised. An exception that only interrupted the wait for it leaves it running."""
        future = self._future
        return future.done() and not future.cancelled() and future.exception() is not None

    def cancel(self) -> bool:
        """Ask it to end. False when it already has."""
        self._check_process()
        cancelled = self._future.cancel()
        if cancelled and self._audience is not None:
            self._audience.leave()
        return cancelled

    def __await__(self) -> Generator[Any, None, T_co]:
        self._heard = True
        self._check_process()
        waiting = loops.wait_for(self._future).__await__()
        return waiting if self._audience is None else self._wait(waiting, self._audience)

    def _wait(self, waiting: Generator[Any, None, T_co], audience: Audience) -> Generator[Any, None, T_co]:
        try:
            with audience.waiting():
                return (yield from waiting)
        except loops.cancelled():
            audience.leave()
            raise

    # As a coroutine, one for each task that runs it.

    def send(self, value: Any, /) -> Any:
        """One step of the task that runs it."""
        return self._step(lambda steps: steps.send(value))

    def throw(self, *error: Any) -> Any:
        """The same, with what was raised in it."""
        return self._step(lambda steps: steps.throw(*error))

    def close(self) -> None:
        """The task that ran it is given up; the call goes on."""
        if self._steps is not None:
            for steps in list(self._steps.values()):
                steps.close()
            self._steps = None

    def _step(self, take: Callable[[Generator[Any, None, T_co]], Any]) -> Any:
        task = loops.current_task()
        if self._steps is None:
            self._steps = {}
        steps = self._steps.get(task)
        if steps is None:
            steps = self._steps[task] = self.__await__()
        try:
            return take(steps)
        except BaseException:
            self._steps.pop(task, None)
            raise

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: wait for it here and pass on its result")

    def __del__(self) -> None:
        future = getattr(self, "_future", None)
        if self._heard or future is None or self._generation != _generation:
            return
        if sys is None or sys.is_finalizing():
            return  # collected at the interpreter's end: logging would only print a traceback
        name = type(self).__name__
        with contextlib.suppress(Exception):
            if future.done():
                _tell_unheard(future, name)
            else:
                future.add_done_callback(lambda done: _tell_unheard(done, name))

    def __repr__(self) -> str:
        if self._generation != _generation:
            return f"<{type(self).__name__} of another process>"
        future = self._future
        if not future.done():
            state = "running"
        elif future.cancelled():
            state = "cancelled"
        else:
            error = future.exception()
            state = f"raised {type(error).__name__}" if error else "done"
        return f"<{type(self).__name__} {state}>"

    def _operation(self) -> Operation[T_co]:
        return self

    def _check_process(self) -> None:
        # In a forked child the thread that would finish this does not exist, and its locks may be held.
        if self._generation != _generation:
            raise SandboxError(
                "this operation was started before os.fork() and belongs to the parent process"
            )

    def _check_waitable(self) -> None:
        self._check_process()
        if not self._future.done():
            refuse_to_block()


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    from lowtide import validate

    return validate.timeout("timeout", value)


def _tell_unheard(future: concurrent.futures.Future[Any], name: str) -> None:
    """As asyncio does it for a task. What ended with its sandbox has failed no one."""
    if future.cancelled():
        return
    error = future.exception()
    if error is not None and isinstance(error, Exception) and not isinstance(error, SandboxGone):
        import logging

        from lowtide import logger

        logger.get(
            "lowtide"
        ).later(  # a finalizer runs anywhere, also while this thread holds a handler's lock
            logging.ERROR,
            "nobody asked for the result of a call that failed (%s): %s: %s",
            name,
            type(error).__name__,
            error,
        )


class Waitable(Protocol):
    """What `wait` takes: an Operation, a Process, or a Sandbox (which is done once commands can run)."""

    def _operation(self) -> Operation[Any]: ...


W = TypeVar("W", bound=Waitable)


@overload
def results(operations: Operation[T]) -> T: ...
@overload
def results(operations: Iterable[Operation[T]]) -> list[T]: ...
def results(operations: Operation[T] | Iterable[Operation[T]]) -> T | list[T]:
    """The results of operations that run in parallel, in the order given; of one, its own.

    All of them are waited for, also when one fails. Then the first failure (in the order given) is
    raised as it is, so that ``except`` clauses work; every other failure is named in its notes.
    """
    if isinstance(operations, Operation):
        return operations.result()
    started = _items("operations", operations)
    for position, operation in enumerate(started):
        if not isinstance(operation, Operation):
            raise ValidationError(
                f"results() takes operations; item {position} is a {type(operation).__name__}",
                argument="operations",
            )
    answers: list[T] = []
    failures: list[BaseException] = []
    for operation in started:
        try:
            answers.append(operation.result())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            failures.append(error)
    if failures:
        first, *others = failures
        for other in others:
            if other is not first:
                first.add_note(f"also failed: {type(other).__name__}: {other}")
        raise first
    return answers


def wait(
    waitables: Sequence[W], num_returns: int | None = None, timeout: float | None = None
) -> tuple[list[W], list[W]]:
    """Wait until `num_returns` of them (all, when None) have ended or `timeout` seconds are over.

    Returns (done, pending), each in the order given. A failed one counts as done; nothing is raised.
    """
    timeout = _timeout(timeout)
    items = _items("waitables", waitables)
    for position, item in enumerate(items):
        if not hasattr(item, "_operation"):
            raise ValidationError(
                f"wait() takes operations and sandboxes; item {position} is a {type(item).__name__}",
                argument="waitables",
            )
    wanted = len(items) if num_returns is None else num_returns
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise ValidationError(
            f"num_returns must be a whole number, not {type(wanted).__name__}", argument="num_returns"
        )
    if not 0 <= wanted <= len(items):
        raise ValidationError(
            f"num_returns is {wanted} but there are {len(items)} to wait for", argument="num_returns"
        )
    if wanted:
        refuse_to_block()
    from lowtide.threads import Event

    enough, left_to_end = Event(), itertools.count(wanted - 1, -1)

    def ended_one(_: object) -> None:
        if next(left_to_end) == 0:
            enough.set()

    operations = [item._operation() for item in items]
    for operation in operations:
        operation._check_process()
        operation._future.add_done_callback(ended_one)
    if wanted:
        enough.wait(timeout)
    ended = [operation.done() for operation in operations]
    done = [item for item, is_done in zip(items, ended, strict=True) if is_done]
    pending = [item for item, is_done in zip(items, ended, strict=True) if not is_done]
    return done, pending


def _items(argument: str, given: Iterable[W]) -> list[W]:
    if not isinstance(given, Iterable) or isinstance(given, Operation):
        raise ValidationError(f"{argument} must be a list, not a {type(given).__name__}", argument=argument)
    return list(given)


def refuse_to_block() -> None:
    """A blocking wait on the engine's own thread would wait for itself for ever."""
    from lowtide import engine

    if engine.started() and engine.engine().is_current_thread():
        raise RuntimeError("a blocking lowtide call was made on lowtide's own event loop; await it instead")
