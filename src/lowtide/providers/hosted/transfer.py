"""Bytes on their way to a service, counted: whether they move, and what their source raised."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


class Counted:
    """Chunks on their way to a service, after what was `begun` already, and what became of them."""

    def __init__(self, chunks: AsyncIterable[bytes], begun: bytes = b"") -> None:
        self._chunks, self._begun = chunks, begun
        self.bytes = 0
        self.moved = 0
        self.error: BaseException | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._begun:
            self.moved, self.bytes = 1, len(self._begun)
            yield self._begun
        try:
            async for chunk in self._chunks:
                self.moved += 1
                self.bytes += len(chunk)
                yield bytes(chunk)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise
