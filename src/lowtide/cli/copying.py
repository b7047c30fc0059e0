"""What `lowtide cp` does: one file with a progress bar, or a whole directory, into or out of a sandbox."""

from __future__ import annotations

import contextlib
import os
import posixpath
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.addressing import find_sandbox
from lowtide.cli.progress import bar
from lowtide.cli.text import clean
from lowtide.errors import SandboxFileNotFoundError
from lowtide.providers.base import FileKind

if TYPE_CHECKING:
    from lowtide.files import Transfer
    from lowtide.providers.base import FileEntry
    from lowtide.sandbox import Sandbox

_CHUNK = 1 << 20


def copy_in(source: str, sandbox: str, path: str, *, provider: str | None, quiet: bool) -> None:
    """Raises FileNotFoundError and its family for either side, before anything is written."""
    local = Path(source)
    size = local.stat().st_size
    box = find_sandbox(sandbox, provider)
    there = _described(box, path)
    if path.endswith("/") or (there is not None and there.kind is FileKind.DIRECTORY):
        path = posixpath.join(path, local.resolve().name)
    if local.is_dir():
        with bar(f"{local.name}/", None, quiet=quiet):
            _tell_skipped(box.upload(local, path).result())
        return
    with local.open("rb") as file, bar(local.name, size, quiet=quiet) as moved:
        # What is a pipe or a device has no size to be verified against.
        known = size if local.is_file() else None
        chunks = _counted(iter(lambda: file.read(_CHUNK), b""), moved)
        box.write_file_streaming(path, chunks, size=known, mode=local.stat().st_mode & 0o777).result()


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
    local = Path(target)
    if target.endswith("/") or local.is_dir():
        local = local / (posixpath.basename(path.rstrip("/")) or "root")
    if there.kind is FileKind.DIRECTORY:
        with bar(f"{there.name}/", None, quiet=quiet):
            _tell_skipped(box.download(path, local).result())
        return
    # The size is only the bar's: a link's is its own, and a file may grow while it is read.
    total = there.size if there.kind is FileKind.FILE else None
    with _complete_or_absent(local) as fd, bar(local.name, total, quiet=quiet) as moved:
        for chunk in _counted(box.read_file_streaming(path), moved):
            _write_all(fd, chunk)
        if there.kind is FileKind.FILE:
            os.fchmod(fd, there.mode & 0o777)


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


def _counted(chunks: Iterator[bytes], moved: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        moved(len(chunk))


@contextlib.contextmanager
def _complete_or_absent(target: Path) -> Iterator[int]:
    """A file beside the target that takes its name when the block ends well."""
    fd, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(fd, 0o666 & ~umask)
        yield fd
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _tell_skipped(transfer: Transfer) -> None:
    for name in transfer.skipped:
        print(f"lowtide: left out {clean(str(name))}", file=sys.stderr)
