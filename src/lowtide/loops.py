"""The caller's event loop, asyncio's or trio's: waiting there for what happens on the engine's."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import concurrent.futures

T = TypeVar("T")


def in_trio() -> bool:
    """Whether the caller is a trio task. Imports nothing: a program that runs trio has it loaded."""
    # By name and with care: another thread may be importing it just now, and a directory here may have its name.
    ask = getattr(sys.modules.get("trio.lowlevel"), "in_trio_task", None)
    return ask is not None and bool(ask())


def current_task() -> Any:
    """The task that runs now, whichever loop's; None outside of any."""
    if in_trio():
        return sys.modules["trio"].lowlevel.current_task()
    import asyncio

    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def cancelled() -> tuple[type[BaseException], ...]:
    """What a cancelled waiter is raised in this loop."""
    import asyncio

    if in_trio():
        return (sys.modules["trio"].Cancelled, asyncio.CancelledError)
    return (asyncio.CancelledError,)


def wait_for(future: concurrent.futures.Future[T]) -> Awaitable[T]:
    """Wait for what another thread brings; whoever cancels the wait cancels the future."""
    import asyncio

    return _wait_in_trio(future) if in_trio() else asyncio.wrap_future(future)


async def _wait_in_trio(future: concurrent.futures.Future[T]) -> T:
    wake, done = event()
    future.add_done_callback(lambda _: wake())
    try:
        await done()
    except BaseException:
        future.cancel()
        raise
    return future.result()


def event() -> tuple[Callable[[], None], Callable[[], Awaitable[Any]]]:
    """Something that any thread may call once, and what the caller waits with until it was."""
    if in_trio():
        trio = sys.modules["trio"]
        happened, token = trio.Event(), trio.lowlevel.current_trio_token()

        def tell() -> None:
            try:
                token.run_sync_soon(happened.set)
            except trio.RunFinishedError:  # nobody waits there any more
                return

        return tell, happened.wait

    import asyncio

    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # that loop has been closed
            return

    async def wait() -> None:
        await arrived

    return wake, wait


async def shield(work: Awaitable[T]) -> T:
    """Wait for it; a cancellation meanwhile does not reach it."""
    if in_trio():
        with sys.modules["trio"].CancelScope(shield=True):
            return await work

    import asyncio

    return await asyncio.shield(work)
