"""Directory trees as tar streams. What comes out of a sandbox is hostile and is unpacked accordingly."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lowtide.trees.pack import Pack
from lowtide.trees.tar_stream import Reader, TarError
from lowtide.trees.unpack import Careful
from lowtide.trees.walk import DIRECTORY, Position


class Tree(NamedTuple):
    """What was packed or unpacked."""

    files: int
    bytes: int
    skipped: tuple[str, ...]
    changed: tuple[str, ...] = ()
    stripped: tuple[str, ...] = ()


def pack(directory: str, write: Callable[[bytes], object]) -> Tree:
    """Write the content of `directory` as a tar stream. Links stay links; sockets and devices are skipped."""
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        packed = Pack(write, marks=False, ahead=True)
        packed.run(top)
    except OSError as error:
        if isinstance(error.filename, str):  # it is named from the directory on
            error.filename = os.path.join(directory, error.filename)
        raise
    finally:
        os.close(top)
    return Tree(packed.files, packed.bytes, tuple(packed.skipped), tuple(packed.changed))


def unpack(chunks: Iterable[bytes], directory: str, *, most: int | None = None, umask: int = 0) -> Tree:
    """Unpack a tar stream into `directory`, which must be empty and ours alone.

    Raises tarfile.TarError for a broken stream, and TooLarge before more than `most` bytes are written; each entry
    counts for 4 KiB besides its content. `umask` is taken from the modes of files and directories.
    """
    root = os.open(directory, DIRECTORY)
    try:
        unpacked = Careful(root, most=most, umask=umask)
        unpacked.run(Reader(Chunks(chunks)))
    except TarError as error:
        raise tarfile.ReadError(str(error)) from None
    finally:
        os.close(root)
    return Tree(
        unpacked.files,
        unpacked.bytes,
        tuple(unpacked.skipped),
        tuple(unpacked.changed),
        tuple(unpacked.stripped),
    )


def merge(source: str, target: str) -> None:
    """Move what `source` holds into `target`. Files and links are replaced and none is followed; a device is not.

    What has no place there is found before anything is moved.
    """
    top, into = os.open(source, DIRECTORY), os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _merge(top, into, _fits, target)
        _merge(top, into, _move, target)
    finally:
        os.close(top)
        os.close(into)


def _merge(top: int, into: int, each: Callable[[str, int, int], bool], target: str) -> None:
    """`each` says whether it is a directory on both sides, to be gone into."""
    here, there = Position(top), Position(into)
    folders: list[str] = []
    way = [os.listdir(here.fd)]  # for each directory on the way: what is still to come
    try:
        while way:
            if not way[-1]:
                way.pop()
                if way:
                    folders.pop()
                    here.leave()
                    there.leave()
                continue
            name = way[-1].pop()
            try:
                both = each(name, here.fd, there.fd)
                if both:
                    here.enter(name)
                    there.enter(name)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.path.join(target, *folders, name)) from None
            if both:
                folders.append(name)
                way.append(os.listdir(here.fd))
    finally:
        here.close()
        there.close()


def _move(name: str, here: int, there: int) -> bool:
    if _fits(name, here, there):
        return True
    os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
    return False


def _fits(name: str, here: int, there: int) -> bool:
    """Raises where it cannot take the place of what is there."""
    mode = os.lstat(name, dir_fd=here).st_mode
    try:
        old: int | None = os.lstat(name, dir_fd=there).st_mode
    except FileNotFoundError:
        old = None
    if stat.S_ISDIR(mode) and old is not None:
        if not stat.S_ISDIR(old):
            raise NotADirectoryError(
                errno.ENOTDIR, "is no directory; a directory was to take its place", name
            )
        return True
    if old is not None and stat.S_ISDIR(old):
        raise IsADirectoryError(errno.EISDIR, "is a directory; a file was to take its place", name)
    if old is not None and not (stat.S_ISREG(old) or stat.S_ISLNK(old)):
        raise FileExistsError(errno.EEXIST, "is a device, a pipe or a socket, and is not replaced", name)
    return False


class Chunks:
    """Chunks as a file that is read."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        rest = self._rest
        if len(rest) >= size:
            self._rest = rest[size:]
            return bytes(rest[:size])
        pieces: list[bytes | memoryview] = [rest]
        size -= len(rest)
        while size > 0 and (chunk := next(self._chunks, None)) is not None:
            rest = memoryview(chunk)
            pieces.append(rest[:size])
            self._rest = rest[size:]
            size -= len(pieces[-1])
        if size > 0:
            self._rest = memoryview(b"")
        return b"".join(pieces)
