"""Work that may block, in a thread of its own: it takes no place in the loop's pool, and holds up no exit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from lowtide import threads

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises. Cancelled, nobody waits for it any more and it goes on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settle_with: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            settle_with(value)

    def tell(settle_with: Callable[[Any], None], value: Any) -> None:
        try:
            loop.call_soon_threadsafe(settle, settle_with, value)
        except RuntimeError:
            return  # the loop is closed: nobody is left to tell

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            if isinstance(error, StopIteration):
                error = RuntimeError("generator raised StopIteration")
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    threads.start(run)
    return await done
