"""Large files through envd's own transfer, which streams: 256 KiB in flight is all that a command's input allows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.e2b.sdk import LazySandbox
from lowtide.providers.hosted.transfer import IDLE_SECONDS

_PIECE_BYTES = 256 << 10


class EndUnknown(Exception):
    """envd's answer is delimited by its connection's end alone: a cut connection looks the same."""


async def read(box: LazySandbox, path: str, *, user: str | None) -> AsyncIterator[bytes]:
    """The file's bytes, and an error when the answer is cut. Raises EndUnknown where that could not be noticed."""
    opening = box.files.read(path, format="stream", user=user)
    reader = await SERVICE.within(IDLE_SECONDS, opening, f"reading {path}", box.sandbox_id)
    try:
        if not _has_an_end(reader):
            raise EndUnknown
        chunks = aiter(reader)
        while piece := await _piece(chunks):
            yield piece
    finally:
        with contextlib.suppress(Exception):
            await reader.aclose()


def _has_an_end(reader: Any) -> bool:
    """Whether the answer has a length or comes in chunks: the HTTP client then raises when it is cut."""
    answer = getattr(reader, "_response", None)
    if answer is None:  # an SDK that does not show it
        return False
    if str(answer.http_version).startswith("HTTP/2"):
        return True
    return "content-length" in answer.headers or "transfer-encoding" in answer.headers


async def _piece(chunks: AsyncIterator[bytes]) -> bytes:
    """The next chunks, up to a size that is worth passing on; nothing at the end."""
    parts: list[bytes] = []
    size = 0
    async with asyncio.timeout(IDLE_SECONDS):
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size >= _PIECE_BYTES:
                break
    return b"".join(parts)


async def send(box: LazySandbox, path: str, chunks: AsyncIterator[bytes], user: str | None) -> None:
    from e2b.sandbox.filesystem import filesystem
    from e2b.sandbox_async.filesystem import filesystem as using

    if hasattr(filesystem, "AsyncWriteEntry"):
        await box.files.write(path, chunks, user=user)
        return
    # An SDK that takes no stream yet: the request that the newer ones make of it.
    answer = await box._envd_api.post(
        using.ENVD_API_FILES_ROUTE,
        content=chunks,
        headers={"Content-Type": "application/octet-stream"},
        params={"path": path, **({"username": user} if user else {})},
        timeout=None,
    )
    error = await using._ahandle_filesystem_envd_api_exception(answer)
    if error is not None:
        raise error
