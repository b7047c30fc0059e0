"""What every provider gets for free: file operations and directory trees, derived from running commands.

A provider that does one of these natively implements `NativeFiles` or `NativeTrees`, and `files_of` and
`trees_of` take that instead. The scripts need a POSIX ``/bin/sh`` and the tools that busybox has too.
Every name goes in as an argument and comes out between NUL bytes, so no name can be mistaken.
"""

from __future__ import annotations

import asyncio
import posixpath
import stat as modes
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lowtide.errors import (
    ResourceExhaustedError,
    SandboxError,
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
    SandboxPermissionError,
)
from lowtide.providers.base import STDERR, ProcessHandle, ProcessSpec, Provider
from lowtide.providers.optional import FileEntry, FileKind, NativeFiles, NativeTrees

GRACE_SECONDS = 1.0
_MAX_ANSWER_BYTES = 32 << 20
_MOST_LISTED = 100_000  # entries that list_dir takes into memory
_MAX_COMPLAINT_BYTES = 64 << 10


def files_of(provider: Provider) -> NativeFiles:
    """The provider's own file operations, or the derived ones."""
    return provider if isinstance(provider, NativeFiles) else DerivedFiles(provider)


def trees_of(provider: Provider) -> NativeTrees:
    """The provider's own directory transfer, or the derived one."""
    return provider if isinstance(provider, NativeTrees) else DerivedTrees(provider)


class Ran(NamedTuple):
    """What a short command came to."""

    code: int
    stdout: bytes
    stderr: bytes


async def run(provider: Provider, sandbox_id: str, *argv: str) -> Ran:
    """Run a command that answers briefly. Its messages come in English, so that they can be understood."""
    return await _collect(provider, sandbox_id, ProcessSpec(argv=argv, cwd="/"))


async def _collect(provider: Provider, sandbox_id: str, spec: ProcessSpec) -> Ran:
    handle = await provider.start_process(sandbox_id, spec)
    try:
        answer, complaint = bytearray(), bytearray()
        async for stream, data in handle.output():
            if stream == STDERR:
                complaint += data[: _MAX_COMPLAINT_BYTES - len(complaint)]
            else:
                answer += data
            if len(answer) > _MAX_ANSWER_BYTES:
                raise SandboxError(
                    f"{spec.argv[0]} answered with more than {_MAX_ANSWER_BYTES} bytes",
                    provider=provider.name,
                    sandbox_id=sandbox_id,
                )
        return Ran(await handle.wait(), bytes(answer), bytes(complaint))
    except BaseException:
        await asyncio.shield(handle.terminate(GRACE_SECONDS))
        raise
    finally:
        await handle.aclose()


async def working_dir(provider: Provider, sandbox_id: str) -> str:
    """Where commands start that are not told where."""
    spec = ProcessSpec(argv=("/bin/sh", "-c", "pwd && printf x"))
    ran = await _collect(provider, sandbox_id, spec)
    return ran.stdout.decode("utf-8", "surrogateescape")[:-2] or "/"


class DerivedFiles:
    """`NativeFiles` through commands."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def stat(self, sandbox_id: str, path: str) -> FileEntry:
        answer = await self._script(sandbox_id, _STAT, path)
        found = self._entries(sandbox_id, answer, posixpath.dirname(path.rstrip("/")) or "/", path)
        if not found:
            raise self._unreadable(sandbox_id, path)
        return found[0]

    async def list_dir(self, sandbox_id: str, path: str) -> Sequence[FileEntry]:
        answer = await self._script(sandbox_id, _LIST, path, _DESCRIBE)
        return sorted(self._entries(sandbox_id, answer, path), key=lambda entry: entry.name)

    async def make_dir(self, sandbox_id: str, path: str) -> None:
        await self._script(sandbox_id, _MAKE_DIR, path)

    async def remove(self, sandbox_id: str, path: str, *, recursive: bool) -> None:
        await self._script(sandbox_id, _REMOVE, path, "yes" if recursive else "no")

    def _entries(
        self, sandbox_id: str, answer: bytes, directory: str, whole: str | None = None
    ) -> list[FileEntry]:
        try:
            found = _entries(answer, directory, whole)
        except (ValueError, OverflowError, OSError, StopIteration) as error:
            raise self._unreadable(sandbox_id, whole or directory) from error
        if len(found) > _MOST_LISTED:
            raise SandboxFileError(
                f"{directory} holds too much to be listed in memory (more than {_MOST_LISTED} entries); exec a command "
                "that looks for what you want",
                path=directory,
                provider=self._provider.name,
                sandbox_id=sandbox_id,
            )
        return found

    def _unreadable(self, sandbox_id: str, path: str) -> SandboxFileError:
        """Programs of the sandbox describe its files, and may have been replaced."""
        return SandboxFileError(
            f"{path}: what the sandbox's own programs say about it cannot be read",
            path=path,
            provider=self._provider.name,
            sandbox_id=sandbox_id,
        )

    async def _script(self, sandbox_id: str, script: str, path: str, *arguments: str) -> bytes:
        ran = await run(self._provider, sandbox_id, "/bin/sh", "-c", script, "sh", path, *arguments)
        if ran.code != 0:
            raise file_error(ran, path, provider=self._provider.name, sandbox_id=sandbox_id)
        return ran.stdout


class DerivedTrees:
    """`NativeTrees` through ``tar``."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        argv = ("/bin/sh", "-c", _READ_TREE, "sh", path)
        async for chunk in _stream_out(self._provider, sandbox_id, argv, path):
            yield chunk

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        argv = ("/bin/sh", "-c", _WRITE_TREE, "sh", path)
        await _stream_in(self._provider, sandbox_id, argv, path, chunks)


async def read_file(provider: Provider, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
    """`Provider.read_file` for one that can only run commands."""
    argv = ("/bin/sh", "-c", _READ_FILE, "sh", path)
    async for chunk in _stream_out(provider, sandbox_id, argv, path):
        yield chunk


async def write_file(
    provider: Provider, sandbox_id: str, path: str, chunks: AsyncIterable[bytes], *, mode: int | None = None
) -> int:
    """`Provider.write_file` for one that can only run commands."""
    argv = ("/bin/sh", "-c", _WRITE_FILE, "sh", path, f"{mode:o}" if mode is not None else "")
    return await _stream_in(provider, sandbox_id, argv, path, chunks)


def file_error(ran: Ran, path: str, **context: Any) -> SandboxError:
    """What a failed command said, as the error people expect."""
    said = ran.stderr.decode("utf-8", "replace").strip()
    reason = said.rpartition(": ")[2] or f"exit code {ran.code}"
    for words, kind in _MEANINGS:
        if words in said:
            return kind(f"{path}: {words}", path=path, **context)
    if "No space left" in said or "quota exceeded" in said:
        return ResourceExhaustedError(f"{path}: {reason}", **context)
    if ran.code == 127:
        return SandboxError(f"the sandbox lacks a tool that file operations need: {said}", **context)
    return SandboxFileError(f"{path}: {reason}", path=path, **context)


_MEANINGS: tuple[tuple[str, type[SandboxFileError]], ...] = (
    ("Permission denied", SandboxPermissionError),
    ("Operation not permitted", SandboxPermissionError),
    ("Read-only file system", SandboxPermissionError),
    ("Is a directory", SandboxIsADirectoryError),
    ("is a directory", SandboxIsADirectoryError),
    ("Not a directory", SandboxNotADirectoryError),
    ("not a directory", SandboxNotADirectoryError),
    ("File exists", SandboxFileExistsError),
    ("No such file or directory", SandboxFileNotFoundError),
    ("nonexistent directory", SandboxFileNotFoundError),
)

# One batch of names: how many, the names, one line of "mode size time" for each, the targets of links.
# `stat -c` is not POSIX, but GNU and busybox agree on it. When a name vanishes in between, stat fails
# for the batch and is asked again name by name.
_DESCRIBE = r"""
printf '%s\0' "$#" "$@"
lines=$(stat -c '%f %s %Y' -- "$@" 2>/dev/null) ||
  lines=$(for f; do stat -c '%f %s %Y' -- "$f" 2>/dev/null || echo -; done)
printf '%s\0' "$lines"
for f; do
  if [ -L "$f" ]; then t=$(readlink -- "$f"; echo x); printf '%s\0' "${t%??}"; else printf '\0'; fi
done
"""

_STAT = f"""LC_ALL=C; export LC_ALL
stat -c %f -- "$1" >/dev/null || exit 1
{_DESCRIBE}"""

_LIST = """LC_ALL=C; export LC_ALL
[ -d "$1" ] || { stat -L -c %f -- "$1" >/dev/null || exit 1; echo "Not a directory" >&2; exit 1; }
ls -a -- "$1" >/dev/null || exit 1
cd -- "$1" || exit 1
exec find . ! -name . -prune -exec /bin/sh -c "$2" sh {} +"""

_MAKE_DIR = """LC_ALL=C; export LC_ALL
[ -d "$1" ] && exit 0
exec mkdir -p -- "$1" """

_REMOVE = """LC_ALL=C; export LC_ALL
stat -c %f -- "$1" >/dev/null || exit 1
if [ "$2" = yes ]; then exec rm -rf -- "$1"; fi
if [ -d "$1" ] && [ ! -L "$1" ]; then exec rmdir -- "$1"; fi
exec rm -f -- "$1" """

_READ_FILE = """LC_ALL=C; export LC_ALL
[ -d "$1" ] && { echo "Is a directory" >&2; exit 1; }
exec cat -- "$1" """

_WRITE_FILE = """LC_ALL=C; export LC_ALL
[ -d "$1" ] && { echo "Is a directory" >&2; exit 1; }
dir=$(dirname -- "$1"; echo x); dir=${dir%?x}
[ -d "$dir" ] || mkdir -p -- "$dir" || exit 1
cat >"$1" || exit 1
[ -z "$2" ] || exec chmod -- "$2" "$1" """

_READ_TREE = """LC_ALL=C; export LC_ALL
[ -d "$1" ] || { stat -L -c %f -- "$1" >/dev/null || exit 1; echo "Not a directory" >&2; exit 1; }
cd -- "$1" && exec tar -cf - ."""

_WRITE_TREE = """LC_ALL=C; export LC_ALL
[ -d "$1" ] || mkdir -p -- "$1" || exit 1
cd -- "$1" && exec tar -xof -"""


def _entries(answer: bytes, directory: str, whole: str | None = None) -> list[FileEntry]:
    fields = _fields(answer)
    entries: list[FileEntry] = []
    for head in fields:
        if not head or len(entries) > _MOST_LISTED:
            break
        count = int(head)
        names = [next(fields) for _ in range(count)]
        lines = next(fields).split(b"\n")
        targets = [next(fields) for _ in range(count)]
        for name, line, target in zip(names, lines, targets, strict=True):
            if line != b"-":  # gone before it could be looked at
                entries.append(_entry(name, line, target, directory, whole))
    return entries


def _fields(answer: bytes) -> Iterator[bytes]:
    """What stands between NUL bytes, one at a time: of a hostile answer, all of them would fill memory."""
    at = 0
    while (end := answer.find(b"\0", at)) >= 0:
        yield answer[at:end]
        at = end + 1
    yield answer[at:]


def _entry(name: bytes, line: bytes, target: bytes, directory: str, whole: str | None) -> FileEntry:
    raw, size, modified = line.split()
    mode = int(raw, 16)
    shown = name.decode("utf-8", "surrogateescape")
    path = whole if whole is not None else posixpath.join(directory, shown.removeprefix("./"))
    kind = FileKind.OTHER
    if modes.S_ISREG(mode):
        kind = FileKind.FILE
    elif modes.S_ISDIR(mode):
        kind = FileKind.DIRECTORY
    elif modes.S_ISLNK(mode):
        kind = FileKind.SYMLINK
    return FileEntry(
        name=posixpath.basename(path.rstrip("/")) or "/",
        path=path,
        kind=kind,
        size=int(size),
        mode=modes.S_IMODE(mode),
        modified_at=datetime.fromtimestamp(int(modified), UTC),
        target=target.decode("utf-8", "surrogateescape") if kind is FileKind.SYMLINK else None,
    )


async def _start(
    provider: Provider, sandbox_id: str, argv: Sequence[str], *, stdin: bool = False
) -> ProcessHandle:
    return await provider.start_process(sandbox_id, ProcessSpec(argv=tuple(argv), cwd="/", stdin=stdin))


async def _stream_out(
    provider: Provider, sandbox_id: str, argv: Sequence[str], path: str
) -> AsyncIterator[bytes]:
    handle = await _start(provider, sandbox_id, argv)
    complaint = bytearray()
    ended = False
    try:
        async for stream, data in handle.output():
            if stream == STDERR:
                complaint += data[: _MAX_COMPLAINT_BYTES - len(complaint)]
            else:
                yield data
        code = await handle.wait()
        ended = True
    finally:
        if not ended:
            await asyncio.shield(handle.terminate(GRACE_SECONDS))
        await handle.aclose()
    if code != 0:
        raise file_error(
            Ran(code, b"", bytes(complaint)), path, provider=provider.name, sandbox_id=sandbox_id
        )


async def _stream_in(
    provider: Provider, sandbox_id: str, argv: Sequence[str], path: str, chunks: AsyncIterable[bytes]
) -> int:
    handle = await _start(provider, sandbox_id, argv, stdin=True)
    reading = asyncio.ensure_future(_drain(handle))
    written = 0
    ended = False
    try:
        try:
            async for chunk in chunks:
                await handle.write_stdin(chunk)
                written += len(chunk)
            await handle.close_stdin()
        except BrokenPipeError:
            pass  # it has ended early: its exit code and its message say why
        ran = await reading
        ended = True
    finally:
        if not ended:
            reading.cancel()
            await asyncio.shield(handle.terminate(GRACE_SECONDS))
        await handle.aclose()
    if ran.code != 0:
        raise file_error(ran, path, provider=provider.name, sandbox_id=sandbox_id)
    return written


async def _drain(handle: ProcessHandle) -> Ran:
    complaint = bytearray()
    async for stream, data in handle.output():
        if stream == STDERR:
            complaint += data[: _MAX_COMPLAINT_BYTES - len(complaint)]
    return Ran(await handle.wait(), b"", bytes(complaint))
