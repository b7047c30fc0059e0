"""Bytes on their way to a service, counted: whether they move, and what their source raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable

from lowtide import errors
from lowtide.providers.hosted.service import Service, let_go


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

    async def watched(
        self, sending: Awaitable[object], idle_seconds: float, *, service: Service, sandbox_id: str
    ) -> None:
        """Until `sending` has sent them: for as long as it takes, while they move. Raises the source's own error."""
        call = asyncio.ensure_future(sending)
        try:
            before = -1
            while not (await asyncio.wait({call}, timeout=idle_seconds))[0]:
                if self.moved == before:
                    raise errors.RequestTimeoutError(
                        f"{service.name} took no data for {idle_seconds:g} s",
                        provider=service.provider,
                        sandbox_id=sandbox_id,
                    )
                before = self.moved
            call.result()
        except BaseException:
            if self.error is not None:  # which a transport wraps
                raise self.error from None
            raise
        finally:
            if not call.done():
                let_go(call)
