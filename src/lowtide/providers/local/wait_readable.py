"""Waiting on the loop for a descriptor."""

from __future__ import annotations

import asyncio


async def readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not waiter.done():
            waiter.set_result(None)

    loop.add_reader(fd, ready)
    try:
        await waiter
    finally:
        loop.remove_reader(fd)
