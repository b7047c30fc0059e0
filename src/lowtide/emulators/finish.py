"""Work that is finished although its caller has left: half of it would spoil what comes after."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_under_way: set[asyncio.Future[Any]] = set()  # the loop itself holds a task only weakly


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Whoever waits here may be cancelled; the work is not."""
    task = asyncio.ensure_future(work)
    _under_way.add(task)
    task.add_done_callback(_over)
    return await asyncio.shield(task)


def _over(task: asyncio.Future[Any]) -> None:
    _under_way.discard(task)
    if not task.cancelled():
        task.exception()  # nobody may be left to hear it
