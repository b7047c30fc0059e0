"""Directory trees as tar streams. What comes out of a sandbox is hostile and is unpacked accordingly.

The standard library's ``data`` filter is not enough here: it trusts ``realpath``, which long chains of
links have defeated before. Here no link is ever followed: every directory is opened from its parent
without following links, links are made last, and only those that provably stay inside.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple, cast

from lowtide.trees.holes import finish, write_or_skip
from lowtide.trees.tar import members, open_stream
from lowtide.trees.walk import DIRECTORY, walk

_BLOCK = 1 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree(NamedTuple):
    """What was packed or unpacked."""

    files: int
    bytes: int
    skipped: tuple[str, ...]


def pack(directory: str, write: Callable[[bytes], object]) -> Tree:
    """Write the content of `directory` as a tar stream. Links stay links; sockets and devices are skipped."""
    files = size = 0
    skipped: list[str] = []
    folders: list[str] = []
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with tarfile.open(mode="w|", fileobj=cast("IO[bytes]", _Sink(write)), bufsize=_BLOCK) as tar:
            for entry in walk(top):
                if entry.left:
                    folders.pop()
                    continue
                name = "/".join((*folders, entry.name))
                if entry.own >= 0:
                    folders.append(entry.name)
                path = os.path.join(directory, name)
                info = tar.gettarinfo(path, name)
                if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                    skipped.append(name)
                    continue
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                if info.isreg():
                    with open(path, "rb") as file:
                        tar.addfile(info, file)
                    files += 1
                    size += info.size
                else:
                    tar.addfile(info)
                    files += info.islnk()
    finally:
        os.close(top)
    return Tree(files, size, tuple(skipped))


def unpack(chunks: Iterable[bytes], directory: str) -> Tree:
    """Unpack a tar stream into `directory`, which must be empty and ours alone. Raises tarfile.TarError."""
    root = os.open(directory, DIRECTORY)
    unpacking = _Unpacking(root)
    try:
        return unpacking.run(chunks)
    finally:
        unpacking.close()
        os.close(root)


def merge(source: str, target: str) -> None:
    """Move what `source` holds into `target`, replacing files but following no link there."""
    waiting = [(source, target)]
    while waiting:
        folder, into = waiting.pop()
        for entry in list(os.scandir(folder)):
            there = os.path.join(into, entry.name)
            try:
                mode: int | None = os.lstat(there).st_mode
            except FileNotFoundError:
                mode = None
            if not entry.is_dir(follow_symlinks=False):
                if mode is not None and stat.S_ISDIR(mode):
                    raise IsADirectoryError(f"{there} is a directory; a file was to take its place")
                os.replace(entry.path, there)
            elif mode is None:
                os.rename(entry.path, there)
            elif stat.S_ISDIR(mode):
                waiting.append((entry.path, there))
            else:
                raise NotADirectoryError(f"{there} is no directory; a directory was to take its place")


class _Unpacking:
    def __init__(self, root: int) -> None:
        self._root = root
        self._last: tuple[list[str], int] | None = None
        self._files = self._bytes = 0
        self._skipped: list[str] = []
        self._links: list[tuple[list[str], str]] = []

    def run(self, chunks: Iterable[bytes]) -> Tree:
        source = cast("IO[bytes]", _Source(chunks))
        with open_stream(source, _BLOCK) as tar:
            for member in members(tar):
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if ".." in parts or "\0" in member.name:
                    self._skipped.append(member.name)
                    continue
                try:
                    self._take(tar, member, parts)
                except (NotADirectoryError, FileExistsError, FileNotFoundError, _LinkInTheWay):
                    self._skipped.append(member.name)
        for parts, target in self._links:
            self._make_link(parts, target)
        return Tree(self._files, self._bytes, tuple(self._skipped))

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]) -> None:
        if member.isdir():
            with self._directory(parts) as fd:
                if parts:
                    os.fchmod(fd, (member.mode & 0o777) | 0o700)
        elif not parts:
            raise FileExistsError
        elif member.isreg():
            content = tar.extractfile(member)
            if content is None:
                raise FileNotFoundError
            with self._directory(parts[:-1]) as parent:
                fd = os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=parent)
                with open(fd, "wb") as file:
                    while block := content.read(_BLOCK):
                        write_or_skip(file, block)
                    finish(file)
                    os.fchmod(fd, (member.mode & 0o777) | 0o600)
                    os.utime(fd, (member.mtime, member.mtime))
            self._files += 1
            self._bytes += member.size
        elif member.islnk():
            self._make_hard_link(
                parts, [part for part in member.linkname.split("/") if part not in ("", ".")]
            )
        elif member.issym() and _stays_inside(parts, member.linkname):
            self._links.append((parts, member.linkname))
        else:
            self._skipped.append(member.name)

    @contextlib.contextmanager
    def _directory(self, parts: list[str]) -> Iterator[int]:
        """The directory of that name, made where it is missing, reached without following a link."""
        start, known = (self._root, 0)
        if (
            self._last and parts[: len(self._last[0])] == self._last[0]
        ):  # else a deep tree takes quadratic time
            start, known = self._last[1], len(self._last[0])
        fd = os.dup(start)
        try:
            for part in parts[known:]:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                try:
                    below = os.open(part, DIRECTORY, dir_fd=fd)
                except OSError as error:
                    raise _LinkInTheWay(part) from error
                os.close(fd)
                fd = below
            self._remember(parts, os.dup(fd))
            yield fd
        finally:
            os.close(fd)

    def _remember(self, parts: list[str], fd: int) -> None:
        if self._last is not None:
            os.close(self._last[1])
        self._last = (parts, fd)

    def close(self) -> None:
        if self._last is not None:
            os.close(self._last[1])
            self._last = None

    def _make_hard_link(self, parts: list[str], target: list[str]) -> None:
        if not target or ".." in target:
            raise FileNotFoundError
        with self._directory(target[:-1]) as there, self._directory(parts[:-1]) as here:
            if not stat.S_ISREG(os.stat(target[-1], dir_fd=there, follow_symlinks=False).st_mode):
                raise FileNotFoundError
            os.link(target[-1], parts[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        self._files += 1

    def _make_link(self, parts: list[str], target: str) -> None:
        try:
            with self._directory(parts[:-1]) as parent:
                os.symlink(target, parts[-1], dir_fd=parent)
        except (OSError, _LinkInTheWay):
            self._skipped.append("/".join(parts))


class _LinkInTheWay(Exception):
    """Something that is no directory stands where one was meant."""


def _stays_inside(parts: list[str], target: str) -> bool:
    """Steps up only at the start, and no more of them than the link lies deep.

    A step up after a name could climb out through another link, so it is not allowed at all. What is
    left leads to real directories of the tree, or to links of which the same holds.
    """
    if not target or target.startswith("/") or "\0" in target:
        return False
    steps = [step for step in target.split("/") if step not in ("", ".")]
    up = next((n for n, step in enumerate(steps) if step != ".."), len(steps))
    return up < len(parts) and ".." not in steps[up:]


class _Source(io.RawIOBase):
    """Chunks as a file that tarfile reads."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        pieces: list[bytes] = []
        while size > 0:
            if not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._rest = memoryview(chunk)
            piece = self._rest[:size]
            self._rest = self._rest[len(piece) :]
            size -= len(piece)
            pieces.append(bytes(piece))
        return b"".join(pieces)


class _Sink(io.RawIOBase):
    """What tarfile writes, handed on."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._hand_on = write

    def write(self, data: object) -> int:
        block = bytes(cast("bytes", data))
        self._hand_on(block)
        return len(block)
