"""What `lowtide cp` does: one file with a progress bar, a whole directory, or a tar stream, in or out of a sandbox."""

from __future__ import annotations

import contextlib
import os
import posixpath
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide import files, source
from lowtide.cli.addressing import connected, find_sandbox
from lowtide.cli.progress import bar
from lowtide.cli.text import clean
from lowtide.engine import engine
from lowtide.errors import SandboxFileNotFoundError
from lowtide.providers import derived
from lowtide.providers.base import FileKind
from lowtide.trees import tar_stream

if TYPE_CHECKING:
    from lowtide.files import Transfer
    from lowtide.providers.base import FileEntry
    from lowtide.sandbox import Sandbox

_CHUNK = 1 << 20


def copy_in(given: str, sandbox: str, path: str, *, provider: str | None, quiet: bool) -> None:
    """Raises FileNotFoundError and its family for either side, before anything is written."""
    if given == "-":
        place, sandbox_id = connected(find_sandbox(sandbox, provider))
        chunks = iter(lambda: os.read(0, _CHUNK), b"")
        engine().run(derived.trees_of(place).write_tree(sandbox_id, path, source.chunks_of(chunks)))
        return
    local = Path(given)
    size = local.stat().st_size
    box = find_sandbox(sandbox, provider)
    there = _described(box, path)
    into = there is not None and there.kind is FileKind.DIRECTORY
    if local.is_dir():
        # As `docker cp`: into a directory that is there, with its name; `dir/.` means what it holds.
        if into and not _is_content(given):
            path = posixpath.join(path, local.resolve().name)
        with bar(f"{local.name}/", None, quiet=quiet):
            _tell(box.upload(local, path).result())
        return
    if into or path.endswith("/"):
        path = posixpath.join(path, local.resolve().name)
    with bar(local.name, size, quiet=quiet) as moved:
        if local.is_file():
            _tell(_call(box, path, lambda p, i, at: files.upload(p, i, str(local.resolve()), at, moved)))
            return
        with local.open("rb") as file:  # a pipe or a device: to its end
            chunks = _counted(iter(lambda: file.read(_CHUNK), b""), moved)
            box.write_file_streaming(path, chunks).result()


def copy_out(sandbox: str, path: str, target: str, *, provider: str | None, quiet: bool) -> None:
    """A file appears under its name only when it is complete."""
    box = find_sandbox(sandbox, provider)
    there = _described(box, path)
    if there is None:
        raise SandboxFileNotFoundError(
            f"no such file in sandbox {sandbox}: {path}",
            path=path,
            sandbox_id=box.sandbox_id,
            provider=box.provider,
        )
    name = posixpath.basename(posixpath.normpath(path)) or "root"
    if target == "-":
        write_tar(box, path, "." if _is_content(path) else name, there)
        return
    local, into = Path(target), os.path.isdir(target)
    if there.kind is FileKind.DIRECTORY:
        if into and not _is_content(path):
            local = local / name
        with bar(f"{there.name}/", None, quiet=quiet):
            _tell(box.download(path, local).result())
        return
    if into or target.endswith("/"):
        local = local / name
    # The size is only the bar's: a link's is its own, and a file may grow while it is read.
    total = there.size if there.kind is FileKind.FILE else None
    with bar(local.name, total, quiet=quiet) as moved:
        _tell(_call(box, path, lambda p, i, at: files.download(p, i, at, os.path.abspath(local), moved)))
    if there.kind is FileKind.FILE and stat_is_file(local):
        os.chmod(local, there.mode & 0o777)


def stat_is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def write_tar(box: Sandbox, path: str, name: str, there: FileEntry) -> None:
    """A tar stream on standard output, as `docker cp ID:path -` writes it: everything under the name of `path`."""
    out = sys.stdout.buffer
    if there.kind is not FileKind.DIRECTORY:
        data = box.read_file(path, max_bytes=None).result()
        moment = int(there.modified_at.timestamp()) if there.modified_at else 0
        out.write(tar_stream.header(os.fsencode(name), tar_stream.FILE, there.mode, len(data), moment))
        out.write(data + tar_stream.padding(len(data)) + tar_stream.END)
        return
    place, sandbox_id = connected(box)
    engine().run(_rename(derived.trees_of(place).read_tree(sandbox_id, path), os.fsencode(name), out))
    out.flush()


async def _rename(chunks: AsyncIterator[bytes], name: bytes, out: Any) -> None:
    from lowtide.in_thread import in_thread
    from lowtide.stream import StreamReader

    stream: StreamReader[bytes] = StreamReader(text=False)

    def work() -> None:
        from lowtide.archive import Chunks

        reader = tar_stream.Reader(Chunks(stream))
        for member in reader:
            if member.kind in (tar_stream.MARK, tar_stream.OTHER):
                continue
            inner = member.name.removeprefix(b"./").lstrip(b"/")
            whole = name + b"/" + inner if inner else name + b"/"
            size = member.size if member.kind == tar_stream.FILE else 0
            link = member.link
            if member.kind == tar_stream.HARD_LINK:
                link = name + b"/" + link.removeprefix(b"./")
            out.write(tar_stream.header(whole, member.kind, member.mode, size, member.mtime, link))
            for block in reader.content():
                out.write(block)
            out.write(tar_stream.padding(size))
        out.write(tar_stream.END)

    import asyncio

    writing = asyncio.ensure_future(in_thread(work))
    writing.add_done_callback(lambda _: stream.close())
    try:
        async for chunk in chunks:
            stream.put(chunk)
            await stream.room()
    finally:
        stream.end()
    await writing


def _call(box: Sandbox, path: str, work: Callable[..., Any]) -> Any:
    return box._file_call(path, work).result()


def _is_content(path: str) -> bool:
    return path == "." or path.endswith("/.")


def _described(box: Sandbox, path: str) -> FileEntry | None:
    """What is there, through links; None when nothing is."""
    try:
        found = box.stat(path).result()
        if found.kind is FileKind.SYMLINK:
            # Whether a link leads to a directory is the sandbox's to say: the path with "." goes through it.
            with contextlib.suppress(OSError):
                return box.stat(posixpath.join(path, ".")).result()
        return found
    except (SandboxFileNotFoundError, NotADirectoryError):
        return None


def _counted(chunks: Iterable[bytes], moved: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        moved(len(chunk))


def _tell(transfer: Transfer) -> None:
    for names, what in (
        (transfer.skipped, "left out"),
        (transfer.changed, "changed while it was read:"),
        (transfer.stripped, "without its set-id bits:"),
    ):
        for name in names:
            print(f"lowtide: {what} {clean(str(name))}", file=sys.stderr)
