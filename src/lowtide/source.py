"""Where the bytes of an upload come from: memory, a file, an iterable, or an async one of somebody's own loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import IO, Any, TypeVar

from lowtide import loops, validate
from lowtide.errors import ValidationError

T = TypeVar("T")

_CHUNK = 1 << 20


def chunks_of(data: bytes | Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterable[bytes]:
    """Any source of bytes as one that the engine can read. Call it where the source belongs."""
    if isinstance(data, bytes | bytearray | memoryview):
        return blocks(bytes(data))
    if isinstance(data, AsyncIterable):
        if loops.in_trio():
            raise ValidationError(
                "an async iterable of a trio program cannot be read on lowtide's own loop; pass bytes or an iterable",
                argument="data",
            )
        try:
            home = asyncio.get_running_loop()
        except RuntimeError:
            return data  # it belongs to no loop yet, so the engine's will do
        return _from_loop(data, home)
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise ValidationError(
            f"data must be bytes or an iterable of bytes, not {type(data).__name__}", argument="data"
        )
    return _from_thread(data)


async def blocks(content: bytes) -> AsyncIterator[bytes]:
    if len(content) <= _CHUNK:
        yield content
        return
    view = memoryview(content)
    for start in range(0, len(content), _CHUNK):
        yield bytes(view[start : start + _CHUNK])


async def read_blocks(file: IO[bytes]) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while block := await loop.run_in_executor(None, file.read, _CHUNK):
        yield block


async def _from_thread(data: Iterable[bytes]) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    source = iter(data)
    end = object()
    while (chunk := await loop.run_in_executor(None, next, source, end)) is not end:
        yield validate.content("data", chunk)


async def _from_loop(data: AsyncIterable[bytes], home: asyncio.AbstractEventLoop) -> AsyncIterator[bytes]:
    """An async generator belongs to the loop it was made in: each step is taken there."""
    source = aiter(data)
    end = object()

    async def step() -> Any:
        return await anext(source, end)

    while (chunk := await _at(home, step)) is not end:
        yield validate.content("data", chunk)


async def _at(home: asyncio.AbstractEventLoop, step: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`step` taken on `home`, and cancelled there with us.

    It is made there too: a loop that is closed before it comes to it has nothing of ours left to complain about.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def begin() -> None:
        if answer.cancelled():
            return
        task = home.create_task(step())
        task.add_done_callback(settle)
        answer.add_done_callback(lambda _: task.done() or _tell(home, task.cancel))

    def settle(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            answer.cancel()
            return
        error = task.exception()
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up in this moment
            answer.set_result(task.result()) if error is None else answer.set_exception(error)

    if not _tell(home, begin):
        raise ValidationError("the event loop that data belongs to has been closed", argument="data")
    return await asyncio.wrap_future(answer)


def _tell(home: asyncio.AbstractEventLoop, action: Callable[[], object]) -> bool:
    """Whether `home` is still there to hear of it."""
    try:
        home.call_soon_threadsafe(action)
    except RuntimeError:
        return False
    return True
