"""What `lowtide cp` does: one file with a progress bar, a whole directory, or a tar stream, in or out of a sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lowtide import download, local_target, source, upload
from lowtide.cli.addressing import connected, find_sandbox
from lowtide.cli.progress import bar
from lowtide.cli.text import clean
from lowtide.engine import engine
from lowtide.errors import SandboxFileError, SandboxFileNotFoundError
from lowtide.providers import derived
from lowtide.providers.optional import FileKind
from lowtide.transfer import Transfer
from lowtide.trees import tar_stream

if TYPE_CHECKING:
    from lowtide.providers.optional import FileEntry
    from lowtide.sandbox import Sandbox

_CHUNK = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma"}
_MOST_NAMED = 20  # files that became shorter: in an error
_LEFT_OUT, _CHANGED, _STRIPPED = "left out", "changed while it was read:", "without its set-id bits:"
_NOT_WHOLE = b"lowtide: this archive is not whole\n" * 32  # no header: whoever unpacks it says so


def copy_in(given: str, sandbox: str, path: str, *, provider: str | None, quiet: bool) -> None:
    """Raises FileNotFoundError and its family for either side, before anything is written."""
    if given == "-":
        place, sandbox_id = connected(find_sandbox(sandbox, provider))
        engine().run(derived.trees_of(place).write_tree(sandbox_id, path, source.chunks_of(_tar_input())))
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
            _tell(_call(box, path, lambda p, i, at: upload.upload(p, i, str(local.resolve()), at, moved)))
            return
        with local.open("rb") as file:  # a pipe or a device: to its end
            chunks = _counted(iter(lambda: file.read(_CHUNK), b""), moved)
            box.write_file_streaming(path, chunks).result()


def _tar_input() -> Iterator[bytes]:
    """Our standard input; as `docker cp -` takes it, also what gzip, bzip2 or xz has made of a tar stream."""
    with open(0, "rb", closefd=False) as given:
        kind = next((name for magic, name in _COMPRESSED.items() if given.peek(6).startswith(magic)), None)
        if kind is None:
            yield from iter(lambda: given.read1(_CHUNK), b"")
            return
        import importlib

        try:
            with importlib.import_module(kind).open(given) as plain:
                yield from iter(lambda: plain.read(_CHUNK), b"")
        except Exception as error:  # each of them has errors of its own
            raise OSError(errno.EINVAL, f"what came is not whole: {error}", "standard input") from error


def copy_out(
    sandbox: str, path: str, target: str, *, provider: str | None, quiet: bool, max_bytes: int | None = None
) -> None:
    """A file appears under its name only when it is complete. A tar stream is not bounded: its reader decides."""
    most = max_bytes or download.MAX_BYTES
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
            _tell(box.download(path, local, max_bytes=most).result())
        return
    if into or target.endswith("/"):
        local = local / name
    # The size is only the bar's: a link's is its own, and a file may grow while it is read.
    total = there.size if there.kind is FileKind.FILE else None
    with bar(local.name, total, quiet=quiet) as moved:
        place = os.path.abspath(local)
        _tell(_call(box, path, lambda p, i, at: download.download(p, i, at, place, moved, max_bytes=most)))
    if there.kind is FileKind.FILE and stat_is_file(local):
        os.chmod(local, there.mode & 0o777 & ~local_target.umask())


def stat_is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def write_tar(box: Sandbox, path: str, name: str, there: FileEntry) -> None:
    """A tar stream on standard output, as `docker cp ID:path -` writes it: everything under the name of `path`."""
    out = sys.stdout.buffer
    if there.kind is not FileKind.DIRECTORY:
        _write_file(box, path, os.fsencode(name), there, out)
        return
    place, sandbox_id = connected(box)
    tree = derived.trees_of(place).read_tree(sandbox_id, path)
    top = os.fsencode(name) + b"/"  # said here, and not by every provider: an empty directory is one too
    out.write(tar_stream.header(top, tar_stream.FOLDER, there.mode, 0, _moment(there)))
    shorter = engine().run(_rename(tree, os.fsencode(name), out, _tell_one))
    out.flush()
    if shorter:
        raise _shorter(", ".join(map(clean, shorter)), box)


def _write_file(box: Sandbox, path: str, name: bytes, there: FileEntry, out: IO[bytes]) -> None:
    chunks: Iterable[bytes]
    if there.kind is FileKind.FILE and there.size:
        size, chunks = there.size, box.read_file_streaming(path)
    else:  # a link, or a file that does not say its size
        data = box.read_file(path).result()
        size, chunks = len(data), [data]
    out.write(tar_stream.header(name, tar_stream.FILE, there.mode, size, _moment(there)))
    left = size
    for chunk in chunks:
        out.write(chunk[:left])
        left -= min(left, len(chunk))
    if left:
        raise _shorter(clean(path), box)  # and no end of the archive: nobody takes it for whole
    out.write(tar_stream.padding(size) + tar_stream.END)


def _moment(there: FileEntry) -> int:
    return int(there.modified_at.timestamp() * 1e6) * 1000 if there.modified_at else 0


def _shorter(names: str, box: Sandbox) -> SandboxFileError:
    return SandboxFileError(
        f"became shorter while it was read, and is not whole in the archive: {names}",
        path=names,
        sandbox_id=box.sandbox_id,
        provider=box.provider,
    )


async def _rename(
    chunks: AsyncIterator[bytes], name: bytes, out: IO[bytes], tell: Callable[[str, str], object]
) -> list[str]:
    """The files of which the archive has zeros in the place of what was not there any more; some, where they are many.

    `tell` is called for each name that was left out or changed, when it comes: the sandbox decides how many there are,
    and none of them is kept.
    """
    from lowtide.in_thread import in_thread
    from lowtide.stream import StreamReader

    stream: StreamReader[bytes] = StreamReader(text=False)

    def work() -> list[str]:
        from lowtide.archive import Chunks

        reader = tar_stream.Reader(Chunks(stream))
        shorter: list[str] = []
        last: tuple[str, int] | None = None  # the file before, whose mark may follow
        for member in _or_say_so(reader, out):
            if member.kind == tar_stream.MARK:
                if tar_stream.SKIPPED in member.marks:
                    tell(_LEFT_OUT, os.fsdecode(member.marks[tar_stream.SKIPPED]))
                if tar_stream.READ in member.marks and last is not None:
                    real = member.marks[tar_stream.READ]
                    whole_file = real.isdigit() and len(real) < 20 and int(real) >= last[1]
                    if whole_file:
                        tell(_CHANGED, last[0])
                    elif len(shorter) < _MOST_NAMED:
                        shorter.append(last[0])
                    else:
                        shorter[_MOST_NAMED:] = ["and others"]
                continue
            inner = member.name.removeprefix(b"./").lstrip(b"/")
            link, last = member.link, None
            if not inner:
                continue  # the directory itself
            if member.kind == tar_stream.OTHER or b".." in inner.split(b"/"):
                tell(_LEFT_OUT, os.fsdecode(member.name))
                continue
            if member.kind == tar_stream.HARD_LINK:
                link = name + b"/" + link.removeprefix(b"./").lstrip(b"/")
                if b".." in link.split(b"/"):
                    tell(_LEFT_OUT, os.fsdecode(member.name))
                    continue
            whole = name + b"/" + inner
            size = member.size if member.kind == tar_stream.FILE else 0
            if member.kind == tar_stream.FILE:
                last = (os.fsdecode(inner), size)
            out.write(tar_stream.header(whole, member.kind, member.mode, size, member.mtime_ns, link))
            for block in reader.content():
                out.write(block)
            out.write(tar_stream.padding(size))
        out.write(tar_stream.END)
        return shorter

    import asyncio

    writing = asyncio.ensure_future(in_thread(work))
    writing.add_done_callback(lambda _: stream.close())
    try:
        async for chunk in chunks:
            stream.put(chunk)
            await stream.room()
    except BaseException:
        stream.end()
        await asyncio.wait({writing})
        writing.exception()  # that it ended too soon: why is what is raised here
        raise
    stream.end()
    return await writing


def _or_say_so(reader: tar_stream.Reader, out: IO[bytes]) -> Iterator[tar_stream.Member]:
    """Between two members a stream that ends too soon would pass for a whole one."""
    try:
        yield from reader
    except tar_stream.TarError:
        out.write(_NOT_WHOLE)
        raise


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
        (transfer.skipped, _LEFT_OUT),
        (transfer.changed, _CHANGED),
        (transfer.stripped, _STRIPPED),
    ):
        for name in names:
            _tell_one(what, str(name))


def _tell_one(what: str, name: str) -> None:
    print(f"lowtide: {what} {clean(name)}", file=sys.stderr)
