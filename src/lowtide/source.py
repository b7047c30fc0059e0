"""Where the bytes of an upload come from: memory, a file, an iterable, or an async one of somebody's own loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from lowtide import loops, threads, validate
from lowtide.errors import ValidationError
from lowtide.in_thread import in_thread

T = TypeVar("T")

_CHUNK = 1 << 20
_STDIN_CHUNK = 64 << 10
_AHEAD = 16  # items of an iterable that wait here


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
            return _checked(data)  # it belongs to no loop yet, so the engine's will do
        return _from_loop(data, home)
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise ValidationError(
            f"data must be bytes or an iterable of bytes, not {type(data).__name__}", argument="data"
        )
    return _from_thread(data)


def stdin_of(data: Any) -> AsyncIterable[bytes]:
    """What a command reads: bytes, text, an open file, or an iterable of either."""
    read = getattr(data, "read1", None) or getattr(data, "read", None)
    if callable(read) and not isinstance(data, str | bytes | bytearray):
        return _from_thread(_reads(data, read))  # from where the file is now
    if isinstance(data, str):
        return blocks(validate.content("stdin", data))
    if not isinstance(data, bytes | bytearray | memoryview | Iterable | AsyncIterable) or isinstance(
        data, Mapping
    ):
        raise ValidationError(
            "stdin must be a bool, bytes, a string, an open file or an iterable of bytes, "
            f"not {type(data).__name__}",
            argument="stdin",
        )
    given: Any = data
    return chunks_of(given)


def _reads(file: Any, read: Callable[[int], Any]) -> Iterator[Any]:
    while block := read(_STDIN_CHUNK) or _read_when_ready(file, read):
        yield block


def _read_when_ready(file: Any, read: Callable[[int], Any]) -> Any:
    """Nothing came. That is the end, except of a file that does not block: there it may only be too early."""
    try:
        if os.get_blocking(file.fileno()):
            return None
        threads.select_ready([file], [], [])
    except (AttributeError, OSError, ValueError):
        return None  # no descriptor behind it
    return read(_STDIN_CHUNK)


async def _checked(data: AsyncIterable[Any]) -> AsyncIterator[bytes]:
    async for chunk in data:
        yield validate.content("data", chunk)


async def blocks(content: bytes) -> AsyncIterator[bytes]:
    if len(content) <= _CHUNK:
        yield content
        return
    view = memoryview(content)
    for start in range(0, len(content), _CHUNK):
        yield bytes(view[start : start + _CHUNK])


async def read_blocks(descriptor: int, size: int | None) -> AsyncIterator[bytes]:
    """An open file to the size it had, however it grows; None: to its end (files that say nothing of their size)."""
    left, first = size, True
    while left is None or left > 0:
        most = _CHUNK if left is None else min(_CHUNK, left)
        block = await in_thread(lambda most=most: os.read(descriptor, most))  # type: ignore[misc]
        if not block or (size is None and first and os.fstat(descriptor).st_size):
            return  # at its end; or it was empty and has begun to grow
        first = False
        left = None if left is None else left - len(block)
        yield block


async def _from_thread(data: Iterable[Any]) -> AsyncIterator[bytes]:
    """An iterable in a thread of its own: it may block, and is never further ahead than it is taken."""
    loop = asyncio.get_running_loop()
    items: deque[Any] = deque()
    room = threads.Semaphore(_AHEAD)
    arrived = asyncio.Event()
    over = False

    def run() -> None:
        for item in data:
            room.acquire()
            if over:
                return
            items.append(item)
            loop.call_soon_threadsafe(arrived.set)

    running = asyncio.ensure_future(in_thread(run))
    running.add_done_callback(lambda _: arrived.set())
    try:
        while True:
            ended = running.done()  # asked first: what came before the end is taken
            while items:
                room.release()
                yield validate.content("data", items.popleft())
            if ended:
                break
            await arrived.wait()
            arrived.clear()
        await running
    finally:
        over = True
        room.release()
        if running.done() and not running.cancelled():
            running.exception()
        running.cancel()


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
