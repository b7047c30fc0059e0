"""Bytes in and out of files, through envd's own transfer; memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers.e2b import script
from lowtide.providers.e2b.deadline import within
from lowtide.providers.e2b.process import alone

if TYPE_CHECKING:
    from e2b import AsyncSandbox

IDLE_SECONDS = 120.0
"""How long a transfer may stand still."""


async def read(box: AsyncSandbox, path: str, *, user: str | None) -> AsyncIterator[bytes]:
    opening = box.files.read(path, format="stream", user=user)
    reader = await within(IDLE_SECONDS, opening, f"reading {path}", box.sandbox_id)
    try:
        chunks = aiter(reader)
        while True:
            async with asyncio.timeout(IDLE_SECONDS):
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
            yield chunk
    finally:
        with contextlib.suppress(Exception):
            await reader.aclose()


async def write(
    box: AsyncSandbox,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    user: str | None,
    mode: int | None,
) -> int:
    counted = _Counted(chunks)
    call = asyncio.ensure_future(box.files.write(path, aiter(counted), user=user))
    try:
        before = -1
        while not (await asyncio.wait({call}, timeout=IDLE_SECONDS))[0]:
            if counted.moved == before:
                raise errors.RequestTimeoutError(
                    f"{path}: E2B took no data for {IDLE_SECONDS:g} s",
                    provider="e2b",
                    sandbox_id=box.sandbox_id,
                )
            before = counted.moved
        call.result()
    except BaseException:
        if counted.error is not None:  # the source's own, which the transport wraps
            raise counted.error from None
        raise
    finally:
        if not call.done():
            call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            call.cancel()
    if mode is not None:
        text = 'exec chmod -- "$1" "$2"'
        code = await within(
            IDLE_SECONDS,
            alone(box, script.plain(text, f"{mode:o}", path), user=user or ""),
            f"chmod {path}",
            box.sandbox_id,
        )
        if code != 0:
            raise errors.SandboxPermissionError(
                f"{path}: its mode could not be set", path=path, provider="e2b", sandbox_id=box.sandbox_id
            )
    return counted.bytes


class _Counted:
    """The chunks, and what became of them."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = chunks
        self.bytes = 0
        self.moved = 0
        self.error: BaseException | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
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
