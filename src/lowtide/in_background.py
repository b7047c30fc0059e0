"""Work that goes on whoever waits for it, or nobody."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_background: set[asyncio.Task[Any]] = set()


def in_background(work: Coroutine[Any, Any, Any], *, silent: bool = False) -> asyncio.Task[Any]:
    """Run `work` to its end whatever happens to the caller. The loop itself only holds tasks weakly.

    `silent`: that it failed is not news.
    """
    import asyncio

    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    if silent:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
