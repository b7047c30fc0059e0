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

from lowtide import archive, local_target, source
from lowtide.errors import (
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    ValidationError,
)
from lowtide.held_sandbox import HeldSandbox
from lowtide.in_thread import in_thread
from lowtide.operation import Operation
from lowtide.providers import derived
from lowtide.providers.base import DirectFiles, FileEntry, FileKind, Provider, TimedFiles
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
    """Left out: devices, pipes, sockets, and links that would lead out of the directory."""
    changed: tuple[str, ...] = ()
    """Written to while they were read. What arrived is what was read: at most the size of the start, never padded."""
    stripped: tuple[str, ...] = ()
    """Arrived here without their set-user-ID and set-group-ID bits."""


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
    _verify(written, len(content), path, provider, sandbox_id)


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
        _verify(written, size, path, provider, sandbox_id)
    return written


def local_source(path: str | os.PathLike[str]) -> str:
    """The local file or directory, or an error before anything is sent."""
    source = os.path.abspath(path)
    mode = os.stat(source).st_mode
    if not (stat_modes.S_ISREG(mode) or stat_modes.S_ISDIR(mode)):
        raise ValidationError(
            f"{source} is no file and no directory (a device, a pipe or a socket): give what you read from it to "
            "write_file_streaming()",
            argument="local",
        )
    return source


Moved = Callable[[int], None]
"""Hears of each piece that has been moved."""


async def upload(
    provider: Provider, sandbox_id: str, local: str, remote: str, moved: Moved | None = None
) -> Transfer:
    if _is_directory(local):
        trees = derived.trees_of(provider)
        packing = _Packing(local)
        try:
            await trees.write_tree(sandbox_id, remote, packing.chunks())
        finally:
            await packing.end()
        tree = packing.tree
        if tree is None:
            raise SandboxFileError(f"{remote}: the directory was not taken whole", path=remote)
        return Transfer(files=tree.files, bytes=tree.bytes, skipped=tree.skipped, changed=tree.changed)
    descriptor = await in_thread(lambda: os.open(local, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        return await _upload_file(provider, sandbox_id, local, descriptor, remote, moved)
    finally:
        os.close(descriptor)


async def _upload_file(
    provider: Provider, sandbox_id: str, local: str, descriptor: int, remote: str, moved: Moved | None
) -> Transfer:
    before = os.fstat(descriptor)
    mode, size = before.st_mode & 0o7777, before.st_size
    if isinstance(provider, DirectFiles) and moved is None:
        written = await provider.write_from(sandbox_id, remote, descriptor, mode=mode)
    else:
        counted = _Counted(source.read_blocks(descriptor, size or None), moved)
        if isinstance(provider, TimedFiles):
            written = await provider.write_file_at(
                sandbox_id, remote, counted.chunks(), mode=mode, modified=before.st_mtime
            )
        else:
            written = await provider.write_file(sandbox_id, remote, counted.chunks(), mode=mode)
        _verify(written, counted.count, remote, provider, sandbox_id)
    after = os.fstat(descriptor)
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    changed = () if same and (written == size or not size) else (local,)
    return Transfer(files=1, bytes=written, changed=changed)


async def download(
    provider: Provider, sandbox_id: str, remote: str, local: str, moved: Moved | None = None
) -> Transfer:
    entry = await derived.files_of(provider).stat(sandbox_id, remote)
    if entry.kind is FileKind.DIRECTORY:
        return await _download_tree(provider, sandbox_id, remote, local)
    try:
        return await _download_file(provider, sandbox_id, remote, local, entry, moved)
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


async def _into_thread(
    chunks: AsyncIterator[bytes],
    take: Callable[[Iterable[bytes]], T],
    give_up: Callable[[], None] = lambda: None,
) -> tuple[int, T]:
    """Let `take` use the chunks in a thread of its own, never further ahead than it can follow.

    However this ends, the thread has ended before: what it writes to can be removed then.
    """
    stream: StreamReader[bytes] = StreamReader(text=False)
    taking = asyncio.ensure_future(in_thread(lambda: take(stream)))
    taking.add_done_callback(lambda _: stream.close())  # it may end early: then nobody makes room
    try:
        count = await _pump(chunks, stream)
        stream.end()
        return count, await asyncio.shield(taking)
    except BaseException as error:
        give_up()
        stream.end(error)
        stream.close()
        await _to_its_end(taking)
        raise


async def _to_its_end(work: asyncio.Future[Any]) -> None:
    """A thread's work is not cut off; what it comes to is of no interest any more."""
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()


async def _download_file(
    provider: Provider, sandbox_id: str, remote: str, local: str, entry: FileEntry, moved: Moved | None
) -> Transfer:
    target = os.path.join(local, posixpath.basename(remote)) if _is_directory(local) else local
    os.makedirs(os.path.dirname(target), exist_ok=True)
    place, direct = local_target.resolve(target)
    if direct:
        count = await _download_into(provider, sandbox_id, remote, place)
    else:
        count = await _download_beside(provider, sandbox_id, remote, place, entry, moved)
    changed = entry.kind is FileKind.FILE and bool(entry.size) and count != entry.size
    if changed:
        now = await derived.files_of(provider).stat(sandbox_id, remote)
        if (now.size, now.modified_at) == (entry.size, entry.modified_at):
            _verify(count, entry.size, remote, provider, sandbox_id)
    stripped = (remote,) if entry.kind is FileKind.FILE and entry.mode & 0o6000 else ()
    return Transfer(files=1, bytes=count, changed=(remote,) if changed else (), stripped=stripped)


async def _download_into(provider: Provider, sandbox_id: str, remote: str, place: str) -> int:
    stopped = threading.Event()  # the thread may wait for a reader that never comes

    def keep(chunks: Iterable[bytes]) -> None:
        local_target.write_into(place, chunks, stopped.is_set)

    count, _ = await _into_thread(provider.read_file(sandbox_id, remote), keep, stopped.set)
    return count


async def _download_beside(
    provider: Provider, sandbox_id: str, remote: str, place: str, entry: FileEntry, moved: Moved | None
) -> int:
    """A new file that takes its place when it is whole."""
    fd, part = tempfile.mkstemp(prefix=".lowtide-", dir=os.path.dirname(place))

    def keep(chunks: Iterable[bytes]) -> None:
        with open(fd, "wb", buffering=_CHUNK) as file:
            for chunk in chunks:
                holes.write_or_skip(file, chunk)
                if moved is not None:
                    moved(len(chunk))
            holes.finish(file)

    try:
        if isinstance(provider, DirectFiles) and moved is None:
            try:
                count = await provider.read_into(sandbox_id, remote, fd)
            finally:
                os.close(fd)
        else:
            count, _ = await _into_thread(provider.read_file(sandbox_id, remote), keep)
        executable = 0o111 if entry.kind is FileKind.FILE and entry.mode & 0o100 else 0
        os.chmod(part, (0o666 | executable) & ~_umask())
        if entry.kind is FileKind.FILE and entry.modified_at is not None:
            moment = entry.modified_at.timestamp()
            with contextlib.suppress(OSError, OverflowError):
                os.utime(part, (moment, moment))
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
    return count


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
        moving = asyncio.ensure_future(in_thread(lambda: _put_in_place(scratch, local)))
        try:
            await asyncio.shield(moving)
        except asyncio.CancelledError:
            await _to_its_end(moving)  # moved and removed at once, half of it would be left in place
            raise
    except tarfile.TarError as error:
        raise SandboxFileError(
            f"{remote}: the sandbox sent a broken archive: {error}",
            path=remote,
            provider=provider.name,
            sandbox_id=sandbox_id,
        ) from error
    finally:
        await asyncio.shield(in_thread(lambda: _remove(scratch)))
    return Transfer(**tree._asdict())


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
        self._blocks: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=8)
        self._packing: asyncio.Future[archive.Tree] | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()

        def hand_on(block: bytes | None) -> None:
            if self._stopped:
                raise ConnectionAbortedError("the transfer was given up")
            asyncio.run_coroutine_threadsafe(self._blocks.put(block), loop).result()

        def pack() -> archive.Tree:
            try:
                return archive.pack(self._directory, hand_on)
            finally:
                with contextlib.suppress(ConnectionAbortedError):
                    hand_on(None)

        self._packing = asyncio.ensure_future(in_thread(pack))
        while (block := await self._blocks.get()) is not None:
            yield block
        self.tree = await self._packing

    async def end(self) -> None:
        """Let the thread see that it is over, and its error be heard of: the generator may never be asked again."""
        self._stopped = True
        packing = self._packing
        while packing is not None and not packing.done():
            with contextlib.suppress(asyncio.QueueEmpty):
                self._blocks.get_nowait()
            await asyncio.wait({packing}, timeout=0.05)
        if packing is not None and not packing.cancelled():
            packing.exception()


class _Counted:
    """Chunks, and how many bytes have been asked for of them."""

    def __init__(self, chunks: AsyncIterable[bytes], moved: Moved | None) -> None:
        self._chunks, self._moved, self.count = chunks, moved, 0

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            self.count += len(chunk)
            yield chunk
            if self._moved is not None:
                self._moved(len(chunk))


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
