"""Large files through envd's own transfer, which streams: 256 KiB in flight is all that a command's input allows."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from lowtide.providers import hosted
from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.e2b.sdk import LazySandbox
from lowtide.providers.inside import Client
from lowtide.providers.inside import files as inside

IDLE_SECONDS = 120.0
"""How long a transfer may stand still."""
SMALL_BYTES = 256 << 10
"""Up to here one round trip to the program inside does it."""
_REMOVE_SECONDS = 10.0
_PIECE_BYTES = 256 << 10


async def read(box: LazySandbox, path: str, *, user: str | None) -> AsyncIterator[bytes]:
    opening = box.files.read(path, format="stream", user=user)
    reader = await SERVICE.within(IDLE_SECONDS, opening, f"reading {path}", box.sandbox_id)
    try:
        chunks = aiter(reader)
        while piece := await _piece(chunks):
            yield piece
    finally:
        with contextlib.suppress(Exception):
            await reader.aclose()


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


async def write(
    box: LazySandbox,
    client: Callable[[], Awaitable[Client]],
    path: str,
    source: hosted.Counted,
    *,
    user: str | None,
    mode: int | None,
) -> int:
    """Beside its place first, because envd writes in place; then the program inside puts it there in one step."""
    aside = posixpath.join(posixpath.dirname(path), f".lowtide-{secrets.token_hex(8)}.part")
    try:
        with SERVICE.mapped(box.sandbox_id, path=path):
            sending = _send(box, aside, aiter(source), user)
            await source.watched(sending, IDLE_SECONDS, service=SERVICE, sandbox_id=box.sandbox_id)
        await inside.replace_file(await client(), path, aside, mode=mode)
    except BaseException:
        # Before anybody hears of the end, so that nothing of it is left by then.
        await asyncio.shield(asyncio.ensure_future(_removed(client, aside)))
        raise
    return source.bytes


async def _send(box: LazySandbox, path: str, chunks: AsyncIterator[bytes], user: str | None) -> None:
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


async def _removed(client: Callable[[], Awaitable[Client]], path: str) -> None:
    with contextlib.suppress(Exception):  # the sandbox may be gone, which is why the transfer failed
        async with asyncio.timeout(_REMOVE_SECONDS):
            await inside.remove(await client(), path, recursive=False)
