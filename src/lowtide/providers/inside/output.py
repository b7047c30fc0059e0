"""What a command has written and how it ended, between the connection and its readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable


class Output:
    """Chunks in, chunks out; `on_read` hears how many bytes the reader took."""

    def __init__(self, on_read: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_read = on_read
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._news: asyncio.Future[None] | None = None
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self.waiting = 0

    @property
    def ended(self) -> bool:
        return self._exit.done()

    def put(self, stream: int, data: bytes) -> None:
        self._chunks.append((stream, data))
        self.waiting += len(data)
        self._tell()

    def finish(self, outcome: int | BaseException) -> None:
        if self._exit.done():
            return
        if isinstance(outcome, int):
            self._exit.set_result(outcome)
        else:
            self._exit.set_exception(outcome)
            self._exit.exception()  # a command nobody asks about may fail in silence
        self._tell()

    def forget(self) -> None:
        self._chunks.clear()
        self.waiting = 0

    async def next(self) -> tuple[int, bytes] | None:
        """The next chunk, or None after the last. Raises what ended the command, if it was not the command."""
        while not self._chunks:
            if self._exit.done():
                self._exit.result()
                return None
            self._news = self._loop.create_future()
            await self._news
        chunk = self._chunks.popleft()
        self.waiting -= len(chunk[1])
        self._on_read(len(chunk[1]))
        return chunk

    async def chunks(self) -> AsyncIterator[tuple[int, bytes]]:
        while (chunk := await self.next()) is not None:
            yield chunk

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
