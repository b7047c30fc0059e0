"""Files of a sandbox: read, written, listed, removed. Whole files and directories: upload.py, download.py."""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterable, AsyncIterator, Sequence

from lowtide import source
from lowtide.errors import SandboxFileError, SandboxFileNotFoundError
from lowtide.held_sandbox import HeldSandbox
from lowtide.operation import Operation
from lowtide.providers import derived
from lowtide.providers.base import Provider
from lowtide.providers.optional import FileEntry
from lowtide.stream import StreamReader, pump
from lowtide.transfer import verify

_ASK_FROM = 16 << 20


async def absolute(life: HeldSandbox, provider: Provider, sandbox_id: str, path: str) -> str:
    """The path as the provider takes it; a relative one is relative to the working directory."""
    if path.startswith("/"):
        return path
    said = life.settings.working_dir
    base = life.working_dir if said is None else os.fspath(said)
    if base is None:
        base = life.working_dir = await derived.working_dir(provider, sandbox_id)
    return base if path == "." else posixpath.join(base, path)


async def read(provider: Provider, sandbox_id: str, path: str, most: int | None) -> bytes:
    found: list[bytes] = []
    count, asked = 0, False
    async for chunk in provider.read_file(sandbox_id, path):
        count += len(chunk)
        if most is not None and count > most:
            raise _too_large(path, most, provider, sandbox_id)
        if most is not None and count > _ASK_FROM and not asked:  # sooner than all of it is here
            asked = True
            if (await derived.files_of(provider).stat(sandbox_id, path)).size > most:
                raise _too_large(path, most, provider, sandbox_id)
        found.append(chunk)
    return b"".join(found)


async def write(provider: Provider, sandbox_id: str, path: str, content: bytes, mode: int | None) -> None:
    written = await provider.write_file(
        sandbox_id, path, source.blocks(content), size=len(content), mode=mode
    )
    verify(written, len(content), path, provider, sandbox_id)


def reader(life: HeldSandbox, path: str) -> StreamReader[bytes]:
    """A file in chunks; the transfer waits while nobody reads."""
    life.connect()
    stream: StreamReader[bytes] = StreamReader(text=False, on_close=lambda: pumping.cancel())
    pumping = Operation.start(_pump_file(life, path, stream))._unasked()
    return stream


async def write_chunks(
    provider: Provider,
    sandbox_id: str,
    path: str,
    chunks: AsyncIterable[bytes],
    size: int | None,
    mode: int | None,
) -> int:
    if size is not None:
        chunks = _announced(chunks, size, path, provider, sandbox_id)
    written = await provider.write_file(sandbox_id, path, chunks, size=size, mode=mode)
    if size is not None:
        verify(written, size, path, provider, sandbox_id)
    return written


async def list_dir(provider: Provider, sandbox_id: str, path: str) -> Sequence[FileEntry]:
    return await derived.files_of(provider).list_dir(sandbox_id, path)


async def make_dir(provider: Provider, sandbox_id: str, path: str) -> None:
    await derived.files_of(provider).make_dir(sandbox_id, path)


async def remove(provider: Provider, sandbox_id: str, path: str, recursive: bool) -> None:
    await derived.files_of(provider).remove(sandbox_id, path, recursive=recursive)


async def stat(provider: Provider, sandbox_id: str, path: str) -> FileEntry:
    return await derived.files_of(provider).stat(sandbox_id, path)


async def exists(provider: Provider, sandbox_id: str, path: str) -> bool:
    try:
        await derived.files_of(provider).stat(sandbox_id, path)
    except (SandboxFileNotFoundError, NotADirectoryError):
        return False
    return True


def _too_large(path: str, most: int, provider: Provider, sandbox_id: str) -> SandboxFileError:
    return SandboxFileError(
        f"{path} is larger than {most} bytes, and read_file holds a file in memory: use download() or "
        "read_file_streaming(), or say max_bytes",
        path=path,
        provider=provider.name,
        sandbox_id=sandbox_id,
    )


async def _pump_file(life: HeldSandbox, path: str, stream: StreamReader[bytes]) -> None:
    try:
        provider, sandbox_id = await life.ready()
        where = await absolute(life, provider, sandbox_id, path)
        await pump(provider.read_file(sandbox_id, where), stream)
    except BaseException as error:
        stream.end(error)
        raise
    stream.end()


async def _announced(
    chunks: AsyncIterable[bytes], size: int, path: str, provider: Provider, sandbox_id: str
) -> AsyncIterator[bytes]:
    """Fails before the end where there is more or less than was said: no provider puts that in place."""
    count = 0
    async for chunk in chunks:
        count += len(chunk)
        if count > size:
            break
        yield chunk
    if count != size:
        more = "or more " if count > size else ""
        raise SandboxFileError(
            f"{path}: {count} bytes {more}came where size said {size}; nothing was replaced",
            path=path,
            provider=provider.name,
            sandbox_id=sandbox_id,
        )
