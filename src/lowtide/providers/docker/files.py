"""File calls of the Docker provider.

Single files and directories go through our program in the container: it sees what a command sees
(tmpfs and read-only mounts, the sandbox's own user and links), replaces a file in one step, and says
exactly what went wrong. Whole trees go through the engine's archive calls, which need no tar inside.
"""

from __future__ import annotations

import errno
import posixpath
import struct
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lowtide.errors import SandboxFileError, SandboxUnavailableError, ValidationError
from lowtide.providers.base import FileEntry, FileKind
from lowtide.providers.docker import inside
from lowtide.providers.docker.answer import Answer
from lowtide.providers.docker.faults import file_error

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider

_LENGTH = struct.Struct("<L")
_CHUNK = 256 * 1024  # what inside.c takes at most
_KINDS = {"f": FileKind.FILE, "d": FileKind.DIRECTORY, "l": FileKind.SYMLINK}


def checked(path: str) -> str:
    if not path or "\0" in path:
        raise ValidationError(f"not a path: {path!r}", argument="path", provider="docker")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(
            f"the engine's API cannot carry a path that is not UTF-8: {path!r}",
            argument="path",
            provider="docker",
        ) from error
    return path


async def read_file(provider: DockerProvider, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
    async with provider.channels.call(sandbox_id, ["read", checked(path)]) as stream:
        answer = Answer(stream, path, sandbox_id)
        await answer.expect("ok")
        data = b""
        while True:
            while len(data) < 4:
                more = await answer.piece()
                if not more:
                    raise answer.cut_short()
                data += more
            (left,) = _LENGTH.unpack_from(data)
            data = data[4:]
            if left & 0x80000000:
                raise file_error(left & 0x7FFFFFFF, path, sandbox_id)
            if left == 0:
                return
            while left:
                if not data:
                    data = await answer.piece()
                    if not data:
                        raise answer.cut_short()
                piece, data = (data, b"") if len(data) <= left else (data[:left], data[left:])
                left -= len(piece)
                yield piece


async def write_file(
    provider: DockerProvider,
    sandbox_id: str,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    size: int | None,
    mode: int | None,
) -> int:
    command = ["write", checked(path), "-" if mode is None else str(mode & 0o7777)]
    async with provider.channels.call(sandbox_id, command, stdin=True) as stream:
        answer = Answer(stream, path, sandbox_id)
        await answer.expect("ok")
        sent = 0
        try:
            async for chunk in chunks:
                for at in range(0, len(chunk), _CHUNK):
                    piece = chunk[at : at + _CHUNK]
                    await stream.write(_LENGTH.pack(len(piece)) + piece)
                    sent += len(piece)
            if size is not None and sent != size:
                raise SandboxFileError(
                    f"{path}: {sent} bytes came where {size} were announced; nothing was replaced",
                    path=path,
                    provider="docker",
                    sandbox_id=sandbox_id,
                )
            await stream.write(_LENGTH.pack(0))
        except BrokenPipeError:
            await answer.expect("done")  # says why, when it can
            raise
        written = int((await answer.expect("done"))[1])
        if written != sent:
            raise answer.cut_short(f"{written} of {sent} bytes arrived".encode())
        return written


async def stat(provider: DockerProvider, sandbox_id: str, path: str) -> FileEntry:
    async with provider.channels.call(sandbox_id, ["stat", checked(path)]) as stream:
        answer = Answer(stream, path, sandbox_id)
        await answer.expect("ok")
        data = b""
        while data.count(b"\0") < 3:
            more = await answer.piece()
            if not more:
                raise answer.cut_short()
            data += more
    facts, _, target = data.split(b"\0")[:3]
    clean = posixpath.normpath(path)
    return _entry(facts, posixpath.basename(clean) or "/", clean, target)


async def list_dir(provider: DockerProvider, sandbox_id: str, path: str) -> Sequence[FileEntry]:
    async with provider.channels.call(sandbox_id, ["list", checked(path)]) as stream:
        answer = Answer(stream, path, sandbox_id)
        await answer.expect("ok")
        pieces = []
        while more := await answer.piece():
            pieces.append(more)
            if more.endswith(b"\0") and b"".join(pieces[-3:]).endswith(b"\0\0") and _complete(pieces):
                break
    fields = b"".join(pieces).split(b"\0")
    # records of three fields, then the empty record, then what follows the last NUL
    if len(fields) % 3 != 2 or fields[-2]:
        raise answer.cut_short()
    entries = []
    for at in range(0, len(fields) - 2, 3):
        name = fields[at + 1].decode("utf-8", "surrogateescape")
        entries.append(_entry(fields[at], name, posixpath.join(path, name), fields[at + 2]))
    return sorted(entries, key=lambda entry: entry.name)


def _complete(pieces: list[bytes]) -> bool:
    return sum(piece.count(b"\0") for piece in pieces) % 3 == 1


def _entry(facts: bytes, name: str, path: str, target: bytes) -> FileEntry:
    kind, size, mode, modified = facts.decode().split()
    return FileEntry(
        name=name,
        path=path,
        kind=_KINDS.get(kind, FileKind.OTHER),
        size=int(size),
        mode=int(mode),
        modified_at=datetime.fromtimestamp(int(modified), UTC),
        target=target.decode("utf-8", "surrogateescape") if kind == "l" else None,
    )


async def simple(provider: DockerProvider, sandbox_id: str, path: str, *command: str) -> None:
    """mkdir and remove: one line is the answer."""
    async with provider.channels.call(sandbox_id, list(command)) as stream:
        await Answer(stream, path, sandbox_id).expect("ok")


# -- whole trees


async def read_tree(provider: DockerProvider, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
    """A tar stream whose members are named from `path` on: ``./``, ``./a``, …"""
    from lowtide.providers.derived import DerivedTrees

    place = await _place(provider, sandbox_id, path)
    if place is None:
        async for chunk in DerivedTrees(provider).read_tree(sandbox_id, path):
            yield chunk
        return
    client = await provider.client()
    with client.translated(sandbox_id):
        request = client.stream(
            "GET", f"containers/{sandbox_id}/archive", params={"path": posixpath.join(place, ".")}
        )
        async with request as answer:
            async for chunk in answer.content.iter_any():
                yield chunk


async def write_tree(
    provider: DockerProvider, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]
) -> None:
    await simple(provider, sandbox_id, path, "mkdir", checked(path))
    from lowtide.providers.derived import DerivedTrees

    place = await _place(provider, sandbox_id, path)
    if place is None:
        await DerivedTrees(provider).write_tree(sandbox_id, path, chunks)
        return
    client = await provider.client()
    complete = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal complete
        async for chunk in chunks:
            yield chunk
        complete = True

    with client.translated(sandbox_id):
        request = client.stream(
            "PUT", f"containers/{sandbox_id}/archive", params={"path": place}, data=body()
        )
        async with request as answer:
            await answer.read()
    if not complete:
        raise SandboxUnavailableError(
            f"{path}: the engine stopped reading before the end", provider="docker", sandbox_id=sandbox_id
        )


async def _place(provider: DockerProvider, sandbox_id: str, path: str) -> str | None:
    """The directory, absolute and without a link at its end, or None where the engine's archive calls
    do not see what a command sees: on a tmpfs, under a read-only root, as another user."""
    facts = await provider.inspect(sandbox_id)
    host, config = facts.get("HostConfig", {}), facts.get("Config", {})
    place = posixpath.normpath(posixpath.join(config.get("WorkingDir") or "/", checked(path)))
    for _ in range(40):
        entry = await stat(provider, sandbox_id, place)
        if entry.kind is not FileKind.SYMLINK or entry.target is None:
            break
        place = posixpath.normpath(posixpath.join(posixpath.dirname(place), entry.target))
    if entry.kind is not FileKind.DIRECTORY:
        raise file_error(errno.ENOTDIR, path, sandbox_id)
    if host.get("ReadonlyRootfs") or config.get("User") or host.get("Tmpfs"):
        return None
    special = ("/dev", "/proc", "/sys", inside.DIRECTORY)
    return None if any(place == part or place.startswith(part + "/") for part in special) else place
