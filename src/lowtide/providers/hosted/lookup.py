"""What a sandbox is now, asked until it is clear: ready, failed, gone, asleep, or out of reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from lowtide import errors
from lowtide.backoff import backoff
from lowtide.providers.base import SandboxInfo, SandboxState
from lowtide.providers.hosted.service import Service

_MOST_PAGES = 1_000
"""A hundred sandboxes each."""
Look = Callable[[], Awaitable[SandboxInfo]]
"""Asks the control plane, by id. Raises SandboxNotFoundError when there is none."""


async def until_ready(
    look: Look, *, service: Service, sandbox_id: str, seconds: float | None = None, most: float = 1.0
) -> SandboxInfo:
    """What it is when it is not pending any more. Raises SandboxFailedError, or SandboxGone.

    `seconds`: how long it may stay pending. None: for as long as the caller waits. `most`: between two looks.
    """
    deadline = time.monotonic() + seconds if seconds is not None else None
    for delay in backoff(most=most, factor=1.5):
        try:
            found = await look()
        except errors.SandboxNotFoundError as error:
            raise service.gone(sandbox_id) from error
        if found.state in (SandboxState.ENDING, SandboxState.GONE):
            raise service.gone(sandbox_id)
        if found.state is SandboxState.FAILED:
            raise service.failed(sandbox_id, found.reason or "error")
        if found.state is not SandboxState.PENDING:
            return found
        if deadline is not None and time.monotonic() > deadline:
            raise service.failed(sandbox_id, f"not ready after {seconds:g} s")
        await asyncio.sleep(delay)
    raise AssertionError  # `backoff` has no end


def pages(service: Service) -> Iterator[int]:
    """Counts the pages of a list, as far as it can be one: who always names another would keep a sweep for ever."""
    yield from range(_MOST_PAGES)
    raise service.error(
        errors.SandboxUnavailableError, f"{service.name} answers a list that has no end ({_MOST_PAGES} pages)"
    )


async def explained(
    error: errors.LowtideError,
    look: Look,
    *,
    service: Service,
    sandbox_id: str,
    wake: str = "resume()",
    ambiguous: tuple[type[errors.LowtideError], ...] = (
        errors.SandboxGone,
        errors.SandboxUnavailableError,
        errors.SandboxNotFoundError,
    ),
) -> errors.LowtideError:
    """What an error of the way into a sandbox means. The control plane knows: gone, asleep, or out of reach.

    `ambiguous`: what may mean another thing than it says; all else is returned as it is.
    """
    if not isinstance(error, ambiguous) or isinstance(error, errors.RateLimitError | errors.SandboxFileError):
        return error
    try:
        info = await look()
    except errors.SandboxNotFoundError:
        return error if isinstance(error, errors.SandboxGone) else service.gone(sandbox_id)
    except errors.LowtideError:
        return error
    if info.state is SandboxState.ENDING or info.state.terminal:
        return service.gone(sandbox_id)
    if info.state in (SandboxState.STOPPED, SandboxState.PAUSED):
        return service.asleep(sandbox_id, info.state.value, wake)
    if isinstance(error, errors.SandboxGone | errors.SandboxNotFoundError):
        # It is there: what was not found is something in it, or the way to it lags behind.
        return errors.SandboxUnavailableError(str(error), provider=service.provider, sandbox_id=sandbox_id)
    return error
