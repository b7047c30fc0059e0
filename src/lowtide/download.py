"""A file or a whole directory of a sandbox onto this machine: whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from lowtide import archive, local_target, threads
from lowtide.errors import LowtideError, SandboxFileError, SandboxIsADirectoryError
from lowtide.in_thread import in_thread
from lowtide.providers import derived
from lowtide.providers.base import Provider
from lowtide.providers.optional import DirectFiles, FileEntry, FileKind
from lowtide.stream import StreamReader, pump
from lowtide.transfer import Moved, Transfer, verify
from lowtide.trees import holes
from lowtide.trees.remove import remove_tree
from lowtide.trees.walk import TooLarge

T = TypeVar("T")

MAX_BYTES = 64 << 30
"""What one download writes at most, unless the caller says otherwise. Each entry of a directory counts for 4 KiB more."""
UNDECLARED_BYTES = 64 << 20
"""What a file may bring beyond the size that it reports: it may grow, and those of /proc report none."""
_MOST_LINKS = 40
_CHUNK = 1 << 20
_BESIDE = ".lowtide-"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def download(
    provider: Provider,
    sandbox_id: str,
    remote: str,
    local: str,
    moved: Moved | None = None,
    *,
    max_bytes: int | None = MAX_BYTES,
) -> Transfer:
    entry = await derived.files_of(provider).stat(sandbox_id, remote)
    if entry.kind is FileKind.DIRECTORY:
        return await _download_tree(provider, sandbox_id, remote, local, max_bytes)
    bound = await _Bound.of(provider, sandbox_id, remote, entry, max_bytes)
    try:
        return await _download_file(provider, sandbox_id, remote, local, entry, moved, bound)
    except SandboxIsADirectoryError:  # a link to one
        return await _download_tree(provider, sandbox_id, remote, local, max_bytes)


class _Bound:
    """How many bytes a file may bring. The sandbox says how large it is, and may say anything."""

    def __init__(
        self, provider: Provider, sandbox_id: str, remote: str, declared: int, most: int | None
    ) -> None:
        self._remote, self._declared, self._most = remote, declared, most
        self._context: dict[str, Any] = {"path": remote, "provider": provider.name, "sandbox_id": sandbox_id}
        expected = declared + UNDECLARED_BYTES
        self.bytes = expected if most is None else min(expected, most)

    @classmethod
    async def of(
        cls, provider: Provider, sandbox_id: str, remote: str, entry: FileEntry, most: int | None
    ) -> _Bound:
        """By the size that the file reports; a link is followed. What cannot be looked at reports none."""
        found, path = entry, remote
        with contextlib.suppress(SandboxFileError):
            for _ in range(_MOST_LINKS):
                if found.kind is not FileKind.SYMLINK or not found.target:
                    break
                path = posixpath.join(posixpath.dirname(path), found.target)
                found = await derived.files_of(provider).stat(sandbox_id, path)
        declared = found.size if found.kind is FileKind.FILE else 0
        return cls(provider, sandbox_id, remote, max(0, declared), most)

    def exceeded(self) -> SandboxFileError:
        if self._most is not None and self._most <= self._declared + UNDECLARED_BYTES:
            return _too_large(self._most, **self._context)
        return SandboxFileError(
            f"{self._remote} reports a size of {self._declared} bytes and brought more than {self.bytes}; the download "
            "was given up and nothing was replaced. Use read_file_streaming() to read such a file",
            **self._context,
        )

    async def hold(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The chunks, up to the bound; holes come as zeros and count. Raises SandboxFileError beyond it."""
        count = 0
        async with _closed_after(chunks):
            if self._declared > self.bytes:
                raise self.exceeded()
            async for chunk in chunks:
                count += len(chunk)
                if count > self.bytes:
                    raise self.exceeded()
                yield chunk


def _too_large(most: int, *, path: str, provider: str, sandbox_id: str) -> SandboxFileError:
    return SandboxFileError(
        f"{path} is larger than max_bytes={most}; nothing was replaced. Pass a larger max_bytes to download() (None: no "
        "bound), or --max-bytes to lowtide cp",
        path=path,
        provider=provider,
        sandbox_id=sandbox_id,
    )


async def _download_file(
    provider: Provider,
    sandbox_id: str,
    remote: str,
    local: str,
    entry: FileEntry,
    moved: Moved | None,
    bound: _Bound,
) -> Transfer:
    target = os.path.join(local, posixpath.basename(remote)) if _is_directory(local) else local
    os.makedirs(os.path.dirname(target), exist_ok=True)
    place, direct = local_target.resolve(target)
    with _named(target):
        if direct:
            count = await _download_into(provider, sandbox_id, remote, place, bound)
        else:
            count = await _download_beside(provider, sandbox_id, remote, place, entry, moved, bound)
    changed = entry.kind is FileKind.FILE and bool(entry.size) and count != entry.size
    if changed:
        now = await derived.files_of(provider).stat(sandbox_id, remote)
        if (now.size, now.modified_at) == (entry.size, entry.modified_at):
            verify(count, entry.size, remote, provider, sandbox_id)
    stripped = (remote,) if entry.kind is FileKind.FILE and entry.mode & 0o6000 else ()
    return Transfer(files=1, bytes=count, changed=(remote,) if changed else (), stripped=stripped)


async def _download_into(provider: Provider, sandbox_id: str, remote: str, place: str, bound: _Bound) -> int:
    stopped = threads.Event()  # the thread may wait for a reader that never comes

    def keep(chunks: Iterable[bytes]) -> None:
        local_target.write_into(place, chunks, stopped.is_set)

    count, _ = await _into_thread(bound.hold(provider.read_file(sandbox_id, remote)), keep, stopped.set)
    return count


async def _download_beside(
    provider: Provider,
    sandbox_id: str,
    remote: str,
    place: str,
    entry: FileEntry,
    moved: Moved | None,
    bound: _Bound,
) -> int:
    """A new file that takes its place when it is whole."""
    fd, part = tempfile.mkstemp(prefix=_BESIDE, dir=os.path.dirname(place))

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
                count = await provider.read_into(sandbox_id, remote, fd, max_bytes=bound.bytes)
            except TooLarge:
                raise bound.exceeded() from None
            finally:
                os.close(fd)
        else:
            count, _ = await _into_thread(bound.hold(provider.read_file(sandbox_id, remote)), keep)
        executable = 0o111 if entry.kind is FileKind.FILE and entry.mode & 0o100 else 0
        os.chmod(part, (0o666 | executable) & ~local_target.umask())
        if entry.kind is FileKind.FILE and entry.modified_at is not None:
            moment = (entry.modified_at - _EPOCH) // timedelta(microseconds=1) * 1000
            with contextlib.suppress(OSError, OverflowError):
                os.utime(part, ns=(moment, moment))
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
    return count


async def _download_tree(
    provider: Provider, sandbox_id: str, remote: str, local: str, max_bytes: int | None
) -> Transfer:
    os.makedirs(os.path.dirname(local), exist_ok=True)
    with _named(local):
        return await _unpack_beside(provider, sandbox_id, remote, local, max_bytes)


async def _unpack_beside(
    provider: Provider, sandbox_id: str, remote: str, local: str, max_bytes: int | None
) -> Transfer:
    """A new directory that takes its place, or what it holds, when it is whole."""
    scratch = tempfile.mkdtemp(prefix=_BESIDE, dir=os.path.dirname(local))

    def keep(chunks: Iterable[bytes]) -> archive.Tree:
        tree = archive.unpack(chunks, scratch, most=max_bytes, umask=local_target.umask())
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
    except TooLarge:
        assert max_bytes is not None
        raise _too_large(max_bytes, path=remote, provider=provider.name, sandbox_id=sandbox_id) from None
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


@contextlib.contextmanager
def _named(local: str) -> Iterator[None]:
    """An error of this machine's names what was asked for, and not what stands beside it for a while."""
    try:
        yield
    except OSError as error:
        if isinstance(error, LowtideError):
            raise
        beside = isinstance(error.filename, str) and os.path.basename(error.filename).startswith(_BESIDE)
        full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not (beside or full):
            raise
        raise OSError(error.errno, error.strerror, local) from error


def _remove(scratch: str) -> None:
    with contextlib.suppress(OSError):
        remove_tree(Path(scratch))


def _is_directory(local: str) -> bool:
    return os.path.isdir(local)


def _put_in_place(scratch: str, local: str) -> None:
    if _is_directory(local):
        archive.merge(scratch, local)
    else:
        os.chmod(scratch, 0o777 & ~local_target.umask())
        os.rename(scratch, local)


async def _into_thread(
    chunks: AsyncIterator[bytes],
    take: Callable[[Iterable[bytes]], T],
    give_up: Callable[[], None] = lambda: None,
) -> tuple[int, T]:
    """Let `take` use the chunks in a thread of its own, never further ahead than it can follow.

    However this ends, the thread has ended before: what it writes to can be removed then. When `take` fails, no more
    chunks are read: a hostile sandbox sends them without end.
    """
    stream: StreamReader[bytes] = StreamReader(text=False)
    taking = asyncio.ensure_future(in_thread(lambda: take(stream)))
    taking.add_done_callback(lambda _: stream.close())  # it may end early: then nobody makes room
    try:
        async with contextlib.aclosing(_until_done(chunks, taking)) as wanted:
            count = await pump(wanted, stream)
        stream.end()
        return count, await asyncio.shield(taking)
    except BaseException as error:
        give_up()
        stream.end(error)
        stream.close()
        await _to_its_end(taking)
        raise


async def _until_done(
    chunks: AsyncIterator[bytes], taking: asyncio.Future[Any]
) -> AsyncGenerator[bytes, None]:
    async with _closed_after(chunks):
        async for chunk in chunks:
            if taking.done():
                return
            yield chunk


@contextlib.asynccontextmanager
async def _closed_after(chunks: AsyncIterator[bytes]) -> AsyncIterator[None]:
    """The transfer behind the chunks ends here, and not when somebody collects garbage."""
    try:
        yield
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def _to_its_end(work: asyncio.Future[Any]) -> None:
    """A thread's work is not cut off; what it comes to is of no interest any more."""
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()
