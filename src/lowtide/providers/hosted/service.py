"""One service's calls: each with an outer deadline, each error told by the service's table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from lowtide import errors
from lowtide.backoff import backoff
from lowtide.providers.hosted.errors import Fault, Table, retry_after

T = TypeVar("T")
E = TypeVar("E", bound=errors.LowtideError)


class Service:
    """A service by its provider's name and by the name that people know, with what its errors mean."""

    def __init__(
        self,
        provider: str,
        name: str,
        faults: Sequence[Fault],
        *,
        retry_after: Callable[[BaseException], float | None] = retry_after,
        on_call: Callable[[asyncio.Future[Any]], None] | None = None,
    ) -> None:
        """`on_call` hears of every call under way. `retry_after`: where the SDK's errors keep no headers."""
        self.provider, self.name = provider, name
        self.translated = Table(provider, tuple(faults), retry_after).translated
        self.mapped = mapped_by(self.translated)
        self._on_call = on_call

    async def call(
        self,
        seconds: float,
        work: Awaitable[T],
        what: str,
        sandbox_id: str | None = None,
        *,
        path: str | None = None,
    ) -> T:
        """The result of `work`, within `seconds`. Raises lowtide's errors only, with the SDK's as the cause.

        An SDK that cannot read an answer raises anything (KeyError, JSONDecodeError, its models' errors): that is
        SandboxUnavailableError.
        """
        try:
            with self.mapped(sandbox_id, path=path):
                return await self.within(seconds, work, what, sandbox_id)
        except errors.LowtideError:
            raise
        except Exception as error:
            raise self.unreadable(what, error, sandbox_id) from error

    async def again(
        self,
        ask: Callable[[], Awaitable[T]],
        what: str,
        sandbox_id: str | None = None,
        *,
        seconds: float = 30.0,
        patience: float = 2.0,
    ) -> T:
        """As `call`, for what may be asked any number of times: again after a lost answer, while `patience` lasts."""
        deadline = time.monotonic() + patience
        for delay in backoff(0.1, 1.0):
            try:
                return await self.call(seconds, ask(), what, sandbox_id)
            except (errors.SandboxUnavailableError, errors.RequestTimeoutError) as error:
                wait = max(delay, getattr(error, "retry_after_seconds", None) or 0.0)
                if not error.retryable or time.monotonic() + wait > deadline:
                    raise
                await asyncio.sleep(wait)
        raise AssertionError  # `backoff` has no end

    async def within(self, seconds: float, work: Awaitable[T], what: str, sandbox_id: str | None = None) -> T:
        """As `call`, but raises what the SDK raises."""
        call = asyncio.ensure_future(work)
        if self._on_call is not None:
            self._on_call(call)
        return await within(
            seconds, call, what, service=self.name, provider=self.provider, sandbox_id=sandbox_id
        )

    def error(self, kind: type[E], words: str, sandbox_id: str | None = None, **more: Any) -> E:
        """One of lowtide's errors, with whose it is. `more`: what else that kind takes, as ``reason``."""
        return kind(words, provider=self.provider, sandbox_id=sandbox_id, **more)

    def missing(self, sandbox_id: str) -> errors.SandboxNotFoundError:
        words = f"no sandbox {sandbox_id} in this {self.name} account"
        return self.error(errors.SandboxNotFoundError, words, sandbox_id)

    def elsewhere(self, sandbox_id: str) -> errors.SandboxUnavailableError:
        """A 404 that the service has not said itself, by `is_own` or because it shows the sandbox: it proves nothing."""
        return self.error(
            errors.SandboxUnavailableError,
            f"somebody on the way to {self.name} answered in its place; whether {sandbox_id} is there is not known",
            sandbox_id,
        )

    def unreadable(
        self, what: str, error: Exception, sandbox_id: str | None = None
    ) -> errors.SandboxUnavailableError:
        """For an answer that the SDK cannot read. Its words are left out: they may quote what was sent."""
        words = f"{self.name}, or a proxy on the way to it, gave an answer that cannot be read: {what}"
        return self.error(errors.SandboxUnavailableError, f"{words} ({type(error).__name__})", sandbox_id)

    def check_about(self, sandbox_id: str, answered: object) -> None:
        """Raises SandboxUnavailableError for an answer about another sandbox than `sandbox_id`: it proves nothing."""
        if answered != sandbox_id:
            words = (
                f"{self.name}, or a proxy on the way to it, answered about another sandbox than {sandbox_id}"
            )
            raise self.error(errors.SandboxUnavailableError, words, sandbox_id)

    def gone(self, sandbox_id: str) -> errors.SandboxGone:
        words = f"sandbox {sandbox_id} has ended"
        return self.error(errors.SandboxGone, words, sandbox_id, reason="ended")

    def failed(self, sandbox_id: str, reason: str) -> errors.SandboxFailedError:
        words = f"sandbox {sandbox_id} could not be started: {reason}"
        return self.error(errors.SandboxFailedError, words, sandbox_id, reason=reason)

    def asleep(self, sandbox_id: str, state: str, wake: str) -> errors.SandboxUnavailableError:
        """It exists and does not run: `wake` is the call that makes it."""
        words = f"sandbox {sandbox_id} is {state}; {wake} it first"
        return self.error(errors.SandboxUnavailableError, words, sandbox_id, retryable=False)


def was_lost(error: errors.LowtideError) -> bool:
    """Whether nobody knows what the request did: its answer is lost, not negative."""
    silent = isinstance(error, errors.SandboxUnavailableError | errors.RequestTimeoutError)
    return silent and not isinstance(error, errors.RateLimitError) and not error.nothing_sent


async def within(
    seconds: float,
    work: asyncio.Future[T],
    what: str,
    *,
    service: str,
    provider: str,
    sandbox_id: str | None = None,
) -> T:
    """The result of `work`, or RequestTimeoutError after `seconds`, even when `work` ignores being cancelled.

    An outer deadline around every call of an SDK: their own are retried, doubled, or do not hold.
    """
    try:
        done, _ = await asyncio.wait({work}, timeout=seconds)
    except asyncio.CancelledError:
        let_go(work)
        raise
    if not done:
        let_go(work)
        raise errors.RequestTimeoutError(
            f"{service} did not answer within {seconds:g} s: {what}", provider=provider, sandbox_id=sandbox_id
        )
    failure = failure_of(work)
    if failure is not None:
        raise failure
    return work.result()


def failure_of(work: asyncio.Future[Any]) -> BaseException | None:
    """Why it failed. A transport that cancels itself when its connection breaks has not cancelled us."""
    if work.cancelled():
        return ConnectionResetError("the connection was given up")
    return work.exception()


def let_go(work: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; what it still says is not news."""
    work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    work.cancel()


class Translate(Protocol):
    def __call__(
        self, error: BaseException, sandbox_id: str | None = None, *, path: str | None = None
    ) -> errors.LowtideError | None:
        """The lowtide error for something the SDK raised; None for what is not the SDK's."""


class Mapped(Protocol):
    def __call__(
        self, sandbox_id: str | None = None, *, path: str | None = None
    ) -> AbstractContextManager[None]: ...


def mapped_by(translated: Translate) -> Mapped:
    """A context manager that turns what happens inside into `lowtide.errors`, with the original as the cause."""

    @contextmanager
    def mapped(sandbox_id: str | None = None, *, path: str | None = None) -> Iterator[None]:
        try:
            yield
        except errors.LowtideError as error:
            error.sandbox_id = error.sandbox_id or sandbox_id
            raise
        except Exception as error:
            found = translated(error, sandbox_id, path=path)
            if found is None:
                raise
            raise found from error

    return mapped
