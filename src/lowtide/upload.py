"""A file or a whole directory of this machine into a sandbox."""

from __future__ import annotations

import asyncio
import os
import stat as stat_modes
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator

from lowtide import archive, source, threads
from lowtide.errors import SandboxFileError, ValidationError
from lowtide.in_thread import in_thread
from lowtide.providers import derived
from lowtide.providers.base import Provider
from lowtide.providers.optional import DirectFiles, TimedFiles
from lowtide.transfer import Moved, Transfer, verify

_AHEAD = 8  # blocks of a packed directory that wait here


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


async def upload(
    provider: Provider, sandbox_id: str, local: str, remote: str, moved: Moved | None = None
) -> Transfer:
    if os.path.isdir(local):  # noqa: ASYNC240 - one look
        trees = derived.trees_of(provider)
        packing = Packing(local)
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
        verify(written, counted.count, remote, provider, sandbox_id)
    after = os.fstat(descriptor)
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    changed = () if same and (written == size or not size) else (local,)
    return Transfer(files=1, bytes=written, changed=changed)


class Packing:
    """A directory packed in a thread, read on the engine's loop, never further ahead than it is taken."""

    def __init__(self, directory: str) -> None:
        self.tree: archive.Tree | None = None
        self._directory = directory
        self._stopped = False
        self._blocks: deque[bytes] = deque()
        self._room = threads.Semaphore(_AHEAD)
        self._packing: asyncio.Future[archive.Tree] | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def hand_on(block: bytes) -> None:
            self._room.acquire()
            if self._stopped:
                raise ConnectionAbortedError("the transfer was given up")
            self._blocks.append(block)
            loop.call_soon_threadsafe(
                arrived.set
            )  # and no answer is waited for: a busy machine makes it late

        self._packing = asyncio.ensure_future(in_thread(lambda: archive.pack(self._directory, hand_on)))
        self._packing.add_done_callback(lambda _: arrived.set())
        while True:
            ended = self._packing.done()  # asked first: what came before the end is taken
            while self._blocks:
                self._room.release()
                yield self._blocks.popleft()
            if ended:
                break
            await arrived.wait()
            arrived.clear()
        self.tree = await self._packing

    async def end(self) -> None:
        """Let the thread see that it is over, and its error be heard of: the generator may never be asked again."""
        self._stopped = True
        self._room.release()
        if self._packing is not None:
            await asyncio.wait({self._packing})
            if not self._packing.cancelled():
                self._packing.exception()


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
