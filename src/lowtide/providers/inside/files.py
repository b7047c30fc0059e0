"""Files and whole trees through the program inside.

It sees what a command sees (tmpfs and read-only mounts, the sandbox's own user and links), replaces a
file in one step, and says exactly what went wrong.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from lowtide.errors import SandboxFileError, ValidationError
from lowtide.providers.inside.answer import LENGTH, Answer
from lowtide.providers.inside.client import Client
from lowtide.providers.inside.process import InsideProcess
from lowtide.providers.optional import FileEntry, FileKind

_CHUNK = 256 * 1024  # what inside.c takes at most
_MOST_LISTED, _MOST_LISTED_BYTES = 100_000, 32 << 20  # what list_dir takes into memory
_KINDS = {"f": FileKind.FILE, "d": FileKind.DIRECTORY, "l": FileKind.SYMLINK}


async def read_file(client: Client, path: str) -> AsyncIterator[bytes]:
    async with client.call("read", _checked(client, path)) as process:
        answer = _answer(client, process, path)
        await answer.expect("ok")
        async for piece in answer.pieces():
            yield piece


async def write_file(
    client: Client,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    size: int | None = None,
    mode: int | None = None,
    sync: bool = False,
    modified: float | None = None,
) -> int:
    """Replaces the file in one step: who reads it meanwhile sees the old one or the new one."""
    words = (
        "write",
        _checked(client, path),
        "-" if mode is None else str(mode & 0o7777),
        "s" if sync else "-",
        _stamp(modified),
    )
    async with client.call(*words, stdin=True) as process:
        answer = _answer(client, process, path)
        await answer.expect("ok")
        try:
            sent = await _send(process, chunks)
            if size is not None and sent != size:
                raise SandboxFileError(
                    f"{path}: {sent} bytes came where {size} were announced; nothing was replaced",
                    path=path,
                    **_context(client),
                )
            await process.write_stdin(LENGTH.pack(0))
        except BrokenPipeError:
            await answer.expect("done")  # says why, when it can
            raise
        written = int((await answer.expect("done"))[1])
        if written != sent:
            raise answer.cut_short(f"{written} of {sent} bytes arrived".encode())
        return written


async def check_write(client: Client, path: str) -> None:
    """Raises what a write of it would, before a byte is sent. Nothing changes but that its directory is there."""
    async with client.call("write", _checked(client, path), "-", "-", "-", stdin=True) as process:
        await _answer(client, process, path).expect("ok")


async def replace_file(
    client: Client, path: str, source: str, *, mode: int | None = None, modified: float | None = None
) -> None:
    """`source`, a file in the sandbox, takes the place of `path` as a write does. It is gone then."""
    words = ("replace", _checked(client, path), "-" if mode is None else str(mode & 0o7777), source)
    await _simple(client, path, *words, _stamp(modified))


def _stamp(modified: float | None) -> str:
    return "-" if modified is None else f"{modified:.6f}"


async def stat(client: Client, path: str) -> FileEntry:
    async with client.call("stat", _checked(client, path)) as process:
        answer = _answer(client, process, path)
        await answer.expect("ok")
        fields = await _fields(answer)
    if len(fields) != 4:
        raise answer.cut_short()
    clean = posixpath.normpath(path)
    return _entry(answer, fields[0], posixpath.basename(clean) or "/", clean, fields[2])


async def list_dir(client: Client, path: str) -> Sequence[FileEntry]:
    async with client.call("list", _checked(client, path)) as process:
        answer = _answer(client, process, path)
        await answer.expect("ok")
        fields = await _fields(answer)
    # records of three fields, then the empty record, then what follows the last NUL
    if len(fields) % 3 != 2 or fields[-2]:
        raise answer.cut_short()
    entries = []
    for at in range(0, len(fields) - 2, 3):
        if b"/" in fields[at + 1] or fields[at + 1] in (b"", b".", b".."):
            raise answer.cut_short(fields[at + 1])  # joined to a directory here, it would lead out of it
        name = fields[at + 1].decode("utf-8", "surrogateescape")
        entries.append(_entry(answer, fields[at], name, posixpath.join(path, name), fields[at + 2]))
    return sorted(entries, key=lambda entry: entry.name)


async def make_dir(client: Client, path: str) -> None:
    await _simple(client, path, "mkdir", _checked(client, path))


async def remove(client: Client, path: str, *, recursive: bool) -> None:
    await _simple(client, path, "remove", _checked(client, path), "r" if recursive else "-")


async def read_tree(client: Client, path: str) -> AsyncIterator[bytes]:
    """A tar stream whose members are named from `path` on: ``./``, ``./a``, …"""
    async with client.call("pack", _checked(client, path)) as process:
        answer = _answer(client, process, path)
        await answer.expect("ok")
        async for piece in answer.pieces():
            yield piece


async def write_tree(client: Client, path: str, chunks: AsyncIterable[bytes]) -> None:
    async with client.call("unpack", _checked(client, path), stdin=True) as process:
        answer = _answer(client, process, path)
        await answer.expect("ok")
        try:
            await _send(process, chunks)
            await process.write_stdin(LENGTH.pack(0))
        except BrokenPipeError:
            pass  # it has stopped early, and says why
        await answer.expect("ok")


async def _simple(client: Client, path: str, *words: str) -> None:
    """One line is the answer."""
    async with client.call(*words) as process:
        await _answer(client, process, path).expect("ok")


async def _send(process: InsideProcess, chunks: AsyncIterable[bytes]) -> int:
    sent = 0
    async for chunk in chunks:
        for at in range(0, len(chunk), _CHUNK):
            piece = chunk[at : at + _CHUNK]
            await process.write_stdin(LENGTH.pack(len(piece)) + piece)
            sent += len(piece)
    return sent


async def _fields(answer: Answer) -> list[bytes]:
    pieces, size, fields = [], 0, 0
    while more := await answer.piece():
        pieces.append(more)
        size += len(more)
        fields += more.count(b"\0")
        if size > _MOST_LISTED_BYTES or fields > 3 * (_MOST_LISTED + 1):  # three for each entry
            raise answer.too_much(_MOST_LISTED, _MOST_LISTED_BYTES)
    return b"".join(pieces).split(b"\0")


def _entry(answer: Answer, facts: bytes, name: str, path: str, target: bytes) -> FileEntry:
    try:
        kind, size, mode, seconds, *fraction = facts.decode(
            "ascii"
        ).split()  # none: a program from before there was one
        return FileEntry(
            name=name,
            path=path,
            kind=_KINDS.get(kind, FileKind.OTHER),
            size=int(size),
            mode=int(mode),
            modified_at=_moment(int(seconds), int(fraction[0]) if fraction else 0),
            target=target.decode("utf-8", "surrogateescape") if kind == "l" else None,
        )
    except (ValueError, OverflowError, OSError):
        raise answer.cut_short(facts) from None


def _moment(seconds: int, nanoseconds: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanoseconds // 1000)
    except (OverflowError, ValueError, OSError):
        return None  # a time no calendar has: the sandbox sets what it likes


def _answer(client: Client, process: InsideProcess, path: str) -> Answer:
    return Answer(process, path, **_context(client))


def _context(client: Client) -> dict[str, Any]:
    return {"provider": client.provider, "sandbox_id": client.sandbox_id}


def _checked(client: Client, path: str) -> str:
    if not path or "\0" in path:
        raise ValidationError(f"not a path: {path!r}", argument="path", provider=client.provider)
    return path
