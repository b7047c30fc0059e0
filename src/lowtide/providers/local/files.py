"""Files of a sandbox: opened inside with its own rights, streamed here through the open descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import posixpath
import socket
import stat as modes
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Iterator
from datetime import UTC, datetime
from typing import Any, Protocol

from lowtide import errors
from lowtide.in_thread import in_thread
from lowtide.providers.local.spawner_client import Message, Reply
from lowtide.providers.local.wait_readable import readable
from lowtide.providers.optional import FileEntry, FileKind
from lowtide.trees.holes import copy_data

_CHUNK = 1 << 20
_PIPE_BYTES = 1 << 20
_UNDONE_SECONDS = 5.0
_ANSWER_SECONDS = 60.0  # how long one step of a call may take inside
_TREE_SECONDS = 1800.0  # the same where a whole tree is walked
_AT_ONCE = 64
"""How many calls of one process are opened at a time. Each has descriptors under way between processes while it is;
a call that streams is counted only while it begins and while it ends, so that one can feed another."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_AGAIN_SECONDS = 30.0
_MOST_LISTED, _MOST_LISTED_BYTES = 100_000, 32 << 20  # what list_dir takes into memory

_CLASSES: dict[int, type[errors.SandboxFileError]] = {
    errno.ENOENT: errors.SandboxFileNotFoundError,
    errno.EEXIST: errors.SandboxFileExistsError,
    errno.EISDIR: errors.SandboxIsADirectoryError,
    errno.ENOTDIR: errors.SandboxNotADirectoryError,
    errno.EACCES: errors.SandboxPermissionError,
    errno.EPERM: errors.SandboxPermissionError,
    errno.EROFS: errors.SandboxPermissionError,
}


class Caller(Protocol):
    """How to run one of the spawner's calls inside one sandbox."""

    sandbox_id: str

    async def __call__(self, call: str, fds: list[int], **details: Any) -> Reply: ...


def file_error(code: int, why: str, path: str, sandbox_id: str) -> errors.SandboxError:
    message = f"{path}: {why}"
    if code in (errno.ENOSPC, errno.EDQUOT):
        return errors.ResourceExhaustedError(message, provider="local", sandbox_id=sandbox_id)
    kind = _CLASSES.get(code, errors.SandboxFileError)
    return kind(message, path=path, number=code, provider="local", sandbox_id=sandbox_id)


async def answer(
    reply: Reply, path: str, sandbox_id: str, seconds: float | None = None
) -> tuple[Message, list[int]]:
    """What the sandbox's side says. RequestTimeoutError when it says nothing for so long, 60 s by default."""
    seconds = seconds or _ANSWER_SECONDS
    try:
        async with asyncio.timeout(seconds):
            said = await reply.next()
    except TimeoutError:
        raise errors.RequestTimeoutError(
            f"{path}: the file call was not answered within {seconds:.0f} s; it may still take effect. Look at what "
            "keeps the sandbox busy (its CPU limit, its disk), and try again",
            provider="local",
            sandbox_id=sandbox_id,
        ) from None
    if said is None:
        raise errors.SandboxUnavailableError(
            f"{path}: the file call was cut off: the process that served it was killed, or the spawner has ended",
            provider="local",
            sandbox_id=sandbox_id,
            retryable=True,
        )
    message, fds = said
    if message.get("errno") in _SHORT:
        raise errors.ResourceExhaustedError(
            f"{path}: {message['why']}: too many descriptors are open in this process or on their way between "
            "processes of this user; raise the limit (ulimit -n), or do less at once",
            provider="local",
            sandbox_id=sandbox_id,
            retryable=True,
        )
    if "errno" in message:
        if "below" in message:
            path = posixpath.join(path, message["below"])
        raise file_error(message["errno"], message["why"], path, sandbox_id)
    return message, fds


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _slot() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    slots = _slots.get(loop)
    if slots is None:
        slots = _slots[loop] = asyncio.Semaphore(_AT_ONCE)
    return slots


async def _opened(inside: Caller, call: str, path: str, **details: Any) -> tuple[Reply, list[int]]:
    """Begin a call that answers with a descriptor. Where none is left in this process, others' calls end first."""
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + _AGAIN_SECONDS, 0.01
    while True:
        try:
            async with _slot():
                reply = await _ask(inside, call, [], path, **details)
                try:
                    return reply, (await answer(reply, path, inside.sandbox_id))[1]
                except BaseException:
                    reply.close()
                    raise
        except errors.ResourceExhaustedError as error:
            if not error.retryable or loop.time() > until:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.5)


async def _ask(inside: Caller, call: str, fds: list[int], path: str, **details: Any) -> Reply:
    try:
        return await inside(call, fds, path=path, **details)
    except OSError as error:
        if error.errno not in _SHORT or isinstance(error, errors.LowtideError):
            raise
        raise errors.ResourceExhaustedError(
            f"{path}: no descriptor is left for a file call ({error.strerror}): raise the limit of this process "
            "(ulimit -n), or do less at once",
            provider="local",
            sandbox_id=inside.sandbox_id,
            retryable=True,
        ) from error


async def read_file(inside: Caller, path: str) -> AsyncIterator[bytes]:
    reply, fds = await _opened(inside, "read", path)
    reply.close()
    with os.fdopen(fds[0], "rb", buffering=0) as file:
        left = os.fstat(fds[0]).st_size or None  # /proc and its like say 0 although there is something
        first = True
        while left is None or left > 0:
            data = await _read_apart(fds[0]) if left is None else file.read(min(_CHUNK, left))
            if not data:
                break
            if left is None and first and os.fstat(fds[0]).st_size:
                break  # it was empty, and has begun to grow
            first = False
            left = None if left is None else left - len(data)
            yield data
            await asyncio.sleep(0)


async def _read_apart(descriptor: int) -> bytes:
    """From a file without a size, in a thread: one read of a file in /proc can take the kernel seconds, as long as a
    sandbox's process has made its address space."""
    own = os.dup(descriptor)  # the read continues if its caller is cancelled and closes the file

    def work() -> bytes:
        try:
            return os.read(own, _CHUNK)
        finally:
            os.close(own)

    return await in_thread(work)


async def write_file(
    inside: Caller,
    path: str,
    chunks: AsyncIterable[bytes],
    mode: int | None,
    modified: float | None = None,
) -> int:
    async with _replacing(inside, path, mode) as fd:
        written = 0
        async for chunk in chunks:
            view = memoryview(chunk)
            while view:
                with _disk_errors(inside, path):
                    count = os.write(fd, view[: 1 << 22])
                view = view[count:]
                written += count
                await asyncio.sleep(0)
        if modified is not None:
            moment = round(modified * 1e6) * 1000  # as exact as such a number is
            os.utime(fd, ns=(moment, moment))
    return written


async def read_into(inside: Caller, path: str, descriptor: int, max_bytes: int | None = None) -> int:
    reply, fds = await _opened(inside, "read", path)
    reply.close()
    try:
        return await copy(fds[0], descriptor, max_bytes)
    finally:
        os.close(fds[0])


async def write_from(inside: Caller, path: str, descriptor: int, mode: int | None) -> int:
    async with _replacing(inside, path, mode) as fd:
        with _disk_errors(inside, path):
            info = os.fstat(descriptor)
            count = await copy(descriptor, fd)
            os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
            return count


@contextlib.asynccontextmanager
async def _replacing(inside: Caller, path: str, mode: int | None) -> AsyncIterator[int]:
    """A new file inside, that takes the place of `path` when the block ends without an error."""
    reply, fds = await _opened(inside, "write", path, mode=mode)
    with reply:
        try:
            yield fds[0]
        except BaseException:
            # What was begun is gone when the error is heard of, and not a moment later.
            with contextlib.suppress(OSError, TimeoutError):
                reply.socket.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(_UNDONE_SECONDS):
                    await reply.next()
            raise
        finally:
            os.close(fds[0])
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # then there is no answer, which is said
            reply.socket.send(b"C")
        await answer(reply, path, inside.sandbox_id)


@contextlib.contextmanager
def _disk_errors(inside: Caller, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.LowtideError) or error.errno is None:
            raise
        raise file_error(error.errno, os.strerror(error.errno), path, inside.sandbox_id) from error


async def copy(source: int, target: int, most: int | None = None) -> int:
    """All of one open file into another, in a thread, holes as holes. Both stay open."""
    stopped = False

    def work() -> int:
        return copy_data(source, target, lambda: stopped, most)

    copying = asyncio.ensure_future(in_thread(work))
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        stopped = True
        await asyncio.wait([copying])  # it uses descriptors that the caller closes next
        raise


async def stat(inside: Caller, path: str) -> FileEntry:
    async with _slot():
        with await _ask(inside, "stat", [], path) as reply:
            message, _ = await answer(reply, path, inside.sandbox_id)
    return _entry(message["entry"], path)


async def list_dir(inside: Caller, path: str) -> list[FileEntry]:
    lines, count = bytearray(), 0
    async with _slot(), contextlib.aclosing(_stream_out(inside, "list", path)) as chunks:
        async for chunk in chunks:
            lines += chunk
            count += chunk.count(b"\n")
            if count > _MOST_LISTED or len(lines) > _MOST_LISTED_BYTES:
                raise errors.SandboxFileError(
                    f"{path} holds too much to be listed in memory (more than {_MOST_LISTED} entries or "
                    f"{_MOST_LISTED_BYTES >> 20} MiB of names); exec a command that looks for what you want",
                    path=path,
                    provider="local",
                    sandbox_id=inside.sandbox_id,
                )
    top = path.rstrip("/")
    found = [_entry(fields, f"{top}/{fields[0]}") for fields in map(json.loads, lines.splitlines())]
    return sorted(found, key=lambda entry: entry.name)


async def simple(inside: Caller, call: str, path: str, **details: Any) -> None:
    seconds = _TREE_SECONDS if details.get("recursive") else None
    async with _slot():
        with await _ask(inside, call, [], path, **details) as reply:
            await answer(reply, path, inside.sandbox_id, seconds)


def read_tree(inside: Caller, path: str) -> AsyncIterator[bytes]:
    return _stream_out(inside, "read_tree", path)


async def _stream_out(inside: Caller, call: str, path: str) -> AsyncGenerator[bytes, None]:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            reply = await _ask(inside, call, [theirs], path)
        finally:
            os.close(theirs)
        with reply:
            while True:
                try:
                    data = os.read(ours, _CHUNK)
                except BlockingIOError:
                    await _within(readable(ours), path, inside.sandbox_id)
                    continue
                if not data:
                    break
                yield data
            await answer(reply, path, inside.sandbox_id)
    finally:
        os.close(ours)


async def write_tree(inside: Caller, path: str, chunks: AsyncIterable[bytes]) -> None:
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            reply = await _ask(inside, "write_tree", [theirs], path)
        finally:
            os.close(theirs)
        with reply:
            try:
                async for chunk in chunks:
                    await _within(_write_all(ours, chunk), path, inside.sandbox_id)
            except BrokenPipeError:
                pass  # the other end has stopped reading and says why
            os.close(ours)
            ours = -1
            await answer(reply, path, inside.sandbox_id, _TREE_SECONDS)
    finally:
        if ours >= 0:
            os.close(ours)


async def _within(step: Awaitable[None], path: str, sandbox_id: str) -> None:
    """One step of a stream. A tree can be walked for long without a byte, but not for ever."""
    try:
        async with asyncio.timeout(_TREE_SECONDS):
            await step
    except TimeoutError:
        raise errors.RequestTimeoutError(
            f"{path}: nothing has moved for {_TREE_SECONDS:.0f} s", provider="local", sandbox_id=sandbox_id
        ) from None


async def _write_all(fd: int, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view[:_PIPE_BYTES]) :]
        except BlockingIOError:
            waiter: asyncio.Future[None] = loop.create_future()
            loop.add_writer(fd, lambda w=waiter: w.done() or w.set_result(None))  # type: ignore[misc]
            try:
                await waiter
            finally:
                loop.remove_writer(fd)


def _entry(fields: list[Any], path: str) -> FileEntry:
    name, mode, size, modified, target = fields
    kind = FileKind.OTHER
    for test, candidate in (
        (modes.S_ISREG, FileKind.FILE),
        (modes.S_ISDIR, FileKind.DIRECTORY),
        (modes.S_ISLNK, FileKind.SYMLINK),
    ):
        if test(mode):
            kind = candidate
    return FileEntry(
        name=name,
        path=path,
        kind=kind,
        size=size,
        mode=modes.S_IMODE(mode),
        modified_at=_moment(modified),
        target=target,
    )


def _moment(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None  # a time no calendar has: the sandbox sets what it likes
