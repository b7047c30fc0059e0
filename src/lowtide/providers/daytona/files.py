"""Bytes in and out of files, through the daemon's own transfer; memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers import derived, hosted
from lowtide.providers.base import Provider
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import mapped

if TYPE_CHECKING:
    from daytona import AsyncSandbox

IDLE_SECONDS = 120.0
"""How long a transfer may stand still."""
_AT_ONCE_BYTES = 1 << 20
_READ_BYTES = 256 << 10

# What was uploaded aside takes its place: into what is there, through links and with its mode, or as a new file.
_PLACE = """LC_ALL=C; export LC_ALL
[ -d "$2" ] && { rm -f -- "$1"; echo "Is a directory" >&2; exit 1; }
dir=$(dirname -- "$2"; echo x); dir=${dir%?x}
if { [ -d "$dir" ] || mkdir -p -- "$dir"; } &&
  if [ -e "$2" ] || [ -L "$2" ]; then cat -- "$1" >"$2" && rm -f -- "$1"; else mv -- "$1" "$2"; fi
then [ -z "$3" ] || exec chmod -- "$3" "$2"
else code=$?; rm -f -- "$1"; exit $code; fi"""

_UNPACK = """LC_ALL=C; export LC_ALL
{ [ -d "$2" ] || mkdir -p -- "$2"; } && cd -- "$2" && tar -xof "$1"
code=$?; rm -f -- "$1"; exit $code"""


async def read(box: AsyncSandbox, path: str) -> AsyncIterator[bytes]:
    with mapped(box.id, path=path):
        stream = await within(IDLE_SECONDS, box.fs.download_file_stream(path), f"reading {path}", box.id)
    pieces: list[bytes] = []
    size = 0
    async with contextlib.aclosing(stream) as chunks:  # type: ignore[type-var]
        while True:
            with mapped(box.id, path=path):
                try:
                    async with asyncio.timeout(IDLE_SECONDS):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    # The SDK takes an empty file for a broken transfer. A transfer that broke says so otherwise.
                    if size == 0 and str(error).startswith("No file data received"):
                        break
                    raise
            pieces.append(chunk)
            size += len(chunk)
            if size >= _READ_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


async def write(
    provider: Provider,
    box: AsyncSandbox,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    mode: int | None,
) -> int:
    """A small file in one request; a large one aside first, so that a source that fails leaves the old one."""
    source = aiter(chunks)
    begun = bytearray()
    async for chunk in source:
        begun += chunk
        if len(begun) > _AT_ONCE_BYTES:
            chmod = f"{mode:o}" if mode is not None else ""
            return await _aside(provider, box, path, bytes(begun), source, _PLACE, chmod)
    with mapped(box.id, path=path):
        await _at_once(box, path, bytes(begun))
        if mode is not None:
            changing = box.fs.set_file_permissions(path, mode=f"{mode:o}")
            await within(IDLE_SECONDS, changing, f"chmod {path}", box.id)
    return len(begun)


async def write_tree(provider: Provider, box: AsyncSandbox, path: str, chunks: AsyncIterable[bytes]) -> None:
    """A tar stream. As a file first: tar stops reading at the archive's end, which may be before the stream's."""
    await _aside(provider, box, path, b"", aiter(chunks), _UNPACK)


async def _at_once(box: AsyncSandbox, path: str, data: bytes) -> None:
    uploading = box.fs.upload_file(data, path)
    try:
        with mapped(box.id, path=path):
            await within(IDLE_SECONDS, uploading, f"writing {path}", box.id)
    except errors.SandboxFileNotFoundError:
        parent = path.rstrip("/").rpartition("/")[0]
        if not parent:
            raise
        making = box.fs.create_folder(parent, "755")
        await within(IDLE_SECONDS, making, f"making {parent}", box.id)
        await within(IDLE_SECONDS, box.fs.upload_file(data, path), f"writing {path}", box.id)


async def _aside(
    provider: Provider,
    box: AsyncSandbox,
    path: str,
    begun: bytes,
    source: AsyncIterator[bytes],
    script: str,
    argument: str = "",
) -> int:
    """Upload beside, then let a script put it in its place: $1 what was uploaded, $2 the path, $3 the argument."""
    aside = f"/tmp/.lowtide-{secrets.token_hex(8)}"  # noqa: S108 - in the sandbox, and nobody can guess it
    counted = hosted.Counted(source, begun)
    call = asyncio.ensure_future(box.fs.upload_file_stream(counted, aside, timeout=0))
    try:
        before = -1
        while not (await asyncio.wait({call}, timeout=IDLE_SECONDS))[0]:
            if counted.moved == before:
                raise errors.RequestTimeoutError(
                    f"{path}: Daytona took no data for {IDLE_SECONDS:g} s",
                    provider="daytona",
                    sandbox_id=box.id,
                )
            before = counted.moved
        with mapped(box.id, path=path):
            if (failure := hosted.failure_of(call)) is not None:
                raise failure
        ran = await derived.run(provider, box.id, "/bin/sh", "-c", script, "sh", aside, path, argument)
        if ran.code != 0:
            raise derived.file_error(ran, path, provider="daytona", sandbox_id=box.id)
    except BaseException:
        if not call.done():
            call.cancel()
            await asyncio.wait({call}, timeout=5.0)
        await asyncio.shield(_remove(provider, box, aside))
        if counted.error is not None:  # the source's own, which the transport wraps
            raise counted.error from None
        raise
    finally:
        if not call.cancelled() and call.done():
            call.exception()
    return counted.bytes


async def _remove(provider: Provider, box: AsyncSandbox, path: str) -> None:
    with contextlib.suppress(errors.LowtideError, TimeoutError):
        async with asyncio.timeout(10):
            await derived.run(provider, box.id, "rm", "-f", "--", path)
