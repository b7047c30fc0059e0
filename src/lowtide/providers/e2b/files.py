"""Bytes in and out of files, through envd's own transfer; memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
from collections.abc import AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.derived import Ran, file_error
from lowtide.providers.e2b import script
from lowtide.providers.e2b.deadline import within
from lowtide.providers.e2b.envd import alone

if TYPE_CHECKING:
    from e2b import AsyncSandbox

IDLE_SECONDS = 120.0
"""How long a transfer may stand still."""
_REMOVE_SECONDS = 10.0
_SMALL_BYTES = 256 << 10
_PIECE_BYTES = 512 << 10


async def read(box: AsyncSandbox, path: str, *, user: str | None) -> AsyncIterator[bytes]:
    opening = box.files.read(path, format="stream", user=user)
    reader = await within(IDLE_SECONDS, opening, f"reading {path}", box.sandbox_id)
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
    loop = asyncio.get_running_loop()
    heard = loop.time()
    async with asyncio.timeout_at(heard + IDLE_SECONDS) as limit:
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size >= _PIECE_BYTES:
                break
            if loop.time() - heard > 1:
                heard = loop.time()
                limit.reschedule(heard + IDLE_SECONDS)
    return b"".join(parts)


async def write(
    box: AsyncSandbox,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    size: int | None,
    user: str | None,
    mode: int | None,
) -> int:
    """All or nothing: what was there stays until all of the new content has arrived."""
    counted = hosted.Counted(chunks)
    if size is not None and size <= _SMALL_BYTES:
        # Sent in one piece, once its source has given all of it.
        content = b"".join([chunk async for chunk in aiter(counted)])
        await within(
            IDLE_SECONDS, box.files.write(path, content, user=user), f"writing {path}", box.sandbox_id
        )
        if mode is not None:
            await _run(box, path, 'exec chmod -- "$1" "$2"', f"{mode:o}", path, user=user)
        return counted.bytes
    aside = posixpath.join(posixpath.dirname(path), f".lowtide-{secrets.token_hex(8)}")
    try:
        await _upload(box, aside, counted, user=user)
        await _run(box, path, _REPLACE, aside, path, f"{mode:o}" if mode is not None else "", user=user)
    except BaseException:
        # Before anybody hears of the end, so that nothing of it is left by then.
        await asyncio.shield(asyncio.ensure_future(_removed(box, aside, user)))
        raise
    return counted.bytes


# Into the place of what is there, with its owner and mode. Through links, and into what is no plain file.
_REPLACE = """t=$(readlink -f -- "$2";echo x);t=${t%?x};[ -n "$t" ]||t=$2
if [ -d "$t" ];then echo "$2: Is a directory" >&2;exit 1;fi
if [ -e "$t" ]&&[ ! -f "$t" ];then cat -- "$1" >"$t"&&exec rm -f -- "$1";exit 1;fi
if [ -e "$t" ];then chown --reference="$t" -- "$1" 2>/dev/null;chmod --reference="$t" -- "$1"||exit 1;fi
[ -z "$3" ]||chmod -- "$3" "$1"||exit 1
exec mv -fT -- "$1" "$t" """


async def _upload(box: AsyncSandbox, path: str, counted: hosted.Counted, *, user: str | None) -> None:
    call = asyncio.ensure_future(_send(box, path, aiter(counted), user))
    try:
        before = -1
        while not (await asyncio.wait({call}, timeout=IDLE_SECONDS))[0]:
            if counted.moved == before:
                raise errors.RequestTimeoutError(
                    f"E2B took no data for {IDLE_SECONDS:g} s", provider="e2b", sandbox_id=box.sandbox_id
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


async def _send(box: AsyncSandbox, path: str, chunks: AsyncIterator[bytes], user: str | None) -> None:
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


async def _run(box: AsyncSandbox, path: str, text: str, *arguments: str, user: str | None) -> None:
    work = alone(box, script.plain("LC_ALL=C;" + text, *arguments), user=user)
    code, said = await within(IDLE_SECONDS, work, f"writing {path}", box.sandbox_id)
    if code != 0:
        raise file_error(Ran(code, b"", said), path, provider="e2b", sandbox_id=box.sandbox_id)


async def _removed(box: AsyncSandbox, path: str, user: str | None) -> None:
    with contextlib.suppress(Exception):  # the sandbox may be gone, which is why the transfer failed
        work = alone(box, script.plain('exec rm -f -- "$1"', path), user=user)
        await within(_REMOVE_SECONDS, work, "remove", box.sandbox_id)
