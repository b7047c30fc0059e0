"""Files: bytes, streams and whole directories, in and out of a sandbox, each verified."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import stat as stat_modes
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lowtide import archive, source
from lowtide.errors import (
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
)
from lowtide.held_sandbox import HeldSandbox
from lowtide.operation import Operation
from lowtide.providers import derived
from lowtide.providers.base import DirectFiles, FileEntry, FileKind, Provider
from lowtide.stream import StreamReader
from lowtide.trees import holes
from lowtide.trees.remove import remove_tree

T = TypeVar("T")

_CHUNK = 1 << 20
_ASK_FROM = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What an upload or a download moved."""

    files: int
    bytes: int
    skipped: tuple[str, ...] = ()
    """Left out: devices, sockets, and links that would lead out of the directory."""


async def absolute(life: HeldSandbox, provider: Provider, sandbox_id: str, path: str) -> str:
    """The path as the provider takes it; a relative one is relative to the working directory."""
    if path.startswith("/"):
        return path
    base = life.settings.working_dir or life.working_dir
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
    _verify(written, len(content), path, provider, sandbox_id)


def reader(life: HeldSandbox, path: str) -> StreamReader[bytes]:
    """A file in chunks; the transfer waits while nobody reads."""
    life.connect()
    stream: StreamReader[bytes] = StreamReader(text=False, on_close=lambda: pumping.cancel())
    pumping = Operation.start(_pump_file(life, path, stream))
    return stream


async def write_chunks(
    provider: Provider,
    sandbox_id: str,
    path: str,
    chunks: AsyncIterable[bytes],
    size: int | None,
    mode: int | None,
) -> int:
    written = await provider.write_file(sandbox_id, path, chunks, size=size, mode=mode)
    if size is not None:
        _verify(written, size, path, provider, sandbox_id)
    return written


def local_source(path: str | os.PathLike[str]) -> str:
    """The local file or directory, or FileNotFoundError before anything is sent."""
    source = os.path.abspath(path)
    os.stat(source)
    return source


async def upload(provider: Provider, sandbox_id: str, local: str, remote: str) -> Transfer:
    if _is_directory(local):
        trees = derived.trees_of(provider)
        packing = _Packing(local)
        try:
            await trees.write_tree(sandbox_id, remote, packing.chunks())
        finally:
            packing.give_up()
        tree = packing.tree
        if tree is None:
            raise SandboxFileError(f"{remote}: the directory was not taken whole", path=remote)
        return Transfer(files=tree.files, bytes=tree.bytes, skipped=tree.skipped)
    with open(local, "rb") as file:  # noqa: ASYNC230  # opening is quick; reading is done in a thread
        status = os.fstat(file.fileno())
        mode = status.st_mode & 0o777
        if isinstance(provider, DirectFiles) and stat_modes.S_ISREG(status.st_mode):
            written = await provider.write_from(sandbox_id, remote, file.fileno(), mode=mode)
        else:
            written = await provider.write_file(
                sandbox_id, remote, source.read_blocks(file), size=status.st_size, mode=mode
            )
    _verify(written, status.st_size, remote, provider, sandbox_id)
    return Transfer(files=1, bytes=written)


async def download(provider: Provider, sandbox_id: str, remote: str, local: str) -> Transfer:
    entry = await derived.files_of(provider).stat(sandbox_id, remote)
    if entry.kind is FileKind.DIRECTORY:
        return await _download_tree(provider, sandbox_id, remote, local)
    try:
        return await _download_file(provider, sandbox_id, remote, local, entry)
    except SandboxIsADirectoryError:  # a link to one
        return await _download_tree(provider, sandbox_id, remote, local)


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


# Out of the sandbox.


async def _pump_file(life: HeldSandbox, path: str, stream: StreamReader[bytes]) -> None:
    try:
        provider, sandbox_id = await life.ready()
        where = await absolute(life, provider, sandbox_id, path)
        await _pump(provider.read_file(sandbox_id, where), stream)
    except BaseException as error:
        stream.end(error)
        raise
    stream.end()


async def _pump(chunks: AsyncIterator[bytes], stream: StreamReader[bytes]) -> int:
    count = 0
    async for chunk in chunks:
        count += len(chunk)
        stream.put(chunk)
        await stream.room()
    return count


async def _into_thread(chunks: AsyncIterator[bytes], take: Callable[[Iterable[bytes]], T]) -> tuple[int, T]:
    """Let `take` use the chunks in a thread of its own, never further ahead than it can follow."""
    stream: StreamReader[bytes] = StreamReader(text=False)
    taking = asyncio.ensure_future(_in_thread(lambda: take(stream)))
    taking.add_done_callback(lambda _: stream.close())  # it may end early: then nobody makes room
    try:
        count = await _pump(chunks, stream)
    except BaseException as error:
        stream.end(error)
        with contextlib.suppress(BaseException):
            await taking
        raise
    stream.end()
    return count, await asyncio.shield(taking)


async def _download_file(
    provider: Provider, sandbox_id: str, remote: str, local: str, entry: FileEntry
) -> Transfer:
    target = os.path.join(local, posixpath.basename(remote)) if _is_directory(local) else local
    os.makedirs(os.path.dirname(target), exist_ok=True)
    fd, part = tempfile.mkstemp(prefix=".lowtide-", dir=os.path.dirname(target))

    def keep(chunks: Iterable[bytes]) -> None:
        with open(fd, "wb", buffering=_CHUNK) as file:
            for chunk in chunks:
                holes.write_or_skip(file, chunk)
            holes.finish(file)

    try:
        if isinstance(provider, DirectFiles):
            try:
                count = await provider.read_into(sandbox_id, remote, fd)
            finally:
                os.close(fd)
        else:
            count, _ = await _into_thread(provider.read_file(sandbox_id, remote), keep)
        if entry.kind is FileKind.FILE and count != entry.size:
            # It may have been written to in the meantime; then its size now is what counts.
            now = await derived.files_of(provider).stat(sandbox_id, remote)
            _verify(count, now.size, remote, provider, sandbox_id)
        executable = 0o111 if entry.kind is FileKind.FILE and entry.mode & 0o100 else 0
        os.chmod(part, (0o666 | executable) & ~_umask())
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
    return Transfer(files=1, bytes=count)


async def _download_tree(provider: Provider, sandbox_id: str, remote: str, local: str) -> Transfer:
    os.makedirs(os.path.dirname(local), exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=".lowtide-", dir=os.path.dirname(local))

    def keep(chunks: Iterable[bytes]) -> archive.Tree:
        tree = archive.unpack(chunks, scratch)
        for _ in chunks:  # padding after the end of the archive
            pass
        return tree

    try:
        chunks = derived.trees_of(provider).read_tree(sandbox_id, remote)
        _, tree = await _into_thread(chunks, keep)
        await _in_thread(lambda: _put_in_place(scratch, local))
    except tarfile.TarError as error:
        raise SandboxFileError(
            f"{remote}: the sandbox sent a broken archive: {error}",
            path=remote,
            provider=provider.name,
            sandbox_id=sandbox_id,
        ) from error
    finally:
        await asyncio.shield(_in_thread(lambda: _remove(scratch)))
    return Transfer(files=tree.files, bytes=tree.bytes, skipped=tree.skipped)


def _remove(scratch: str) -> None:
    with contextlib.suppress(OSError):
        remove_tree(Path(scratch))


def _is_directory(local: str) -> bool:
    return os.path.isdir(local)


def _put_in_place(scratch: str, local: str) -> None:
    if _is_directory(local):
        archive.merge(scratch, local)
    else:
        os.chmod(scratch, 0o777 & ~_umask())
        os.rename(scratch, local)


def _umask() -> int:
    """Read without changing it, which would be seen by every other thread."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


# Into the sandbox.


class _Packing:
    """A directory packed in a thread, read on the engine's loop, never further ahead than it is taken."""

    def __init__(self, directory: str) -> None:
        self.tree: archive.Tree | None = None
        self._directory = directory
        self._stopped = False

    async def chunks(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        blocks: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=8)

        def hand_on(block: bytes | None) -> None:
            if self._stopped:
                raise ConnectionAbortedError("the transfer was given up")
            asyncio.run_coroutine_threadsafe(blocks.put(block), loop).result()

        def pack() -> archive.Tree:
            try:
                return archive.pack(self._directory, hand_on)
            finally:
                with contextlib.suppress(ConnectionAbortedError):
                    hand_on(None)

        packing = asyncio.ensure_future(_in_thread(pack))
        try:
            while (block := await blocks.get()) is not None:
                yield block
            self.tree = await packing
        finally:
            self.give_up()
            while not packing.done():  # let the thread see that it is over
                with contextlib.suppress(asyncio.QueueEmpty):
                    blocks.get_nowait()
                await asyncio.wait({packing}, timeout=0.05)
            if not packing.cancelled():
                packing.exception()

    def give_up(self) -> None:
        self._stopped = True


async def _in_thread(work: Callable[[], T]) -> T:
    """A thread of its own: work that waits for the loop must not use up the pool the loop needs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settle_with: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            settle_with(value)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            if isinstance(error, StopIteration):
                error = RuntimeError("generator raised StopIteration")
            loop.call_soon_threadsafe(settle, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, done.set_result, result)

    threading.Thread(target=run, name="lowtide-transfer", daemon=True).start()
    return await done


def _too_large(path: str, most: int, provider: Provider, sandbox_id: str) -> SandboxFileError:
    return SandboxFileError(
        f"{path} is larger than {most} bytes, and read_file holds a file in memory: use download() or "
        "read_file_streaming(), or say max_bytes",
        path=path,
        provider=provider.name,
        sandbox_id=sandbox_id,
    )


def _verify(count: int, size: int, path: str, provider: Provider, sandbox_id: str) -> None:
    if count != size:
        raise SandboxFileError(
            f"{path}: {count} bytes arrived of {size}",
            path=path,
            provider=provider.name,
            sandbox_id=sandbox_id,
            retryable=True,
        )
