"""An outer deadline around every call of the SDK, whose own timeouts are retried, doubled, or alarms."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lowtide.errors import RequestTimeoutError

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T], what: str, sandbox_id: str | None = None) -> T:
    """The result of `work`, or RequestTimeoutError after `seconds`, even when `work` ignores being cancelled."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        let_go(task)
        raise
    if not done:
        let_go(task)
        raise RequestTimeoutError(
            f"Daytona did not answer within {seconds:g} s: {what}", provider="daytona", sandbox_id=sandbox_id
        )
    failure = failure_of(task)
    if failure is not None:
        raise failure
    return task.result()


def failure_of(task: asyncio.Future[Any]) -> BaseException | None:
    """Why it failed. A transport that cancels itself when its connection breaks has not cancelled us."""
    if task.cancelled():
        return ConnectionResetError("the connection was given up")
    return task.exception()


def let_go(task: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; what it still says is not news."""
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()
