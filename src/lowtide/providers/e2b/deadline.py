"""An outer deadline around every call of the SDK, whose own timeouts do not always hold."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lowtide.errors import RequestTimeoutError
from lowtide.providers.e2b.leaving import track

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T], what: str, sandbox_id: str | None = None) -> T:
    """The result of `work`, or RequestTimeoutError after `seconds`, even when `work` ignores being cancelled."""
    task = asyncio.ensure_future(work)
    track(task)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _let_go(task)
        raise
    if not done:
        _let_go(task)
        raise RequestTimeoutError(
            f"E2B did not answer within {seconds:g} s: {what}", provider="e2b", sandbox_id=sandbox_id
        )
    return task.result()


def _let_go(task: asyncio.Future[Any]) -> None:
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()
