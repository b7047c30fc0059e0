"""Copying a layer that hostile code may still be writing: no link is followed, nothing but the layer is read."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from lowtide.trees.holes import copy_data
from lowtide.trees.remove import remove_tree
from lowtide.trees.walk import DIRECTORY, Entry, Position, walk

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
ATTRIBUTES = ("user.", "system.posix_acl_")
"""How the names of those extended attributes begin that are copied."""
_WHITEOUT = 0  # device 0/0: how an overlay says "deleted"


def copy_tree(source: str, target: str, *, link: bool = False) -> None:
    """Owners, modes, times, whiteouts, extended attributes, hard links and holes included.

    `link`: of a tree that nobody writes any more, with its files as hard links. FileNotFoundError where somebody did.
    """
    top = os.open(source, DIRECTORY)
    try:
        os.mkdir(target, 0o700)
        into = os.open(target, DIRECTORY)
        try:
            with Entries(f"{target}.links") as entries:
                _Copy(into, link, entries).run(top)
            finish_directory(top, into, os.fstat(top))
        finally:
            os.close(into)
    finally:
        os.close(top)


class _Copy:
    def __init__(self, target: int, link: bool, entries: Entries) -> None:
        self._at, self._link, self._entries = Position(target), link, entries

    def run(self, source: int) -> None:
        try:
            for entry in walk(source):
                if entry.left:
                    finish_directory(entry.own, self._at.fd, os.fstat(entry.own))
                    self._at.leave()
                elif entry.own >= 0:
                    os.mkdir(entry.name, 0o700, dir_fd=self._at.fd)
                    self._at.enter(entry.name)
                elif self._link:
                    self._entries.link(entry, self._at.fd)
                else:
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        self._entries.copy(entry, self._at.fd)
        finally:
            self._at.close()


class Entries:
    """What is no directory, put into a tree.

    A file with several names is copied once. Its copy gets one name more in the directory `links`, named by the
    file's number, from which its other names are made: a sandbox can make more such files than memory should hold, and
    paths longer than a path can be. The directory is made when it is needed, and removed at the end.
    """

    def __init__(self, links: str) -> None:
        self._links_path, self._links = links, -1

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        if self._links >= 0:
            os.close(self._links)
            self._links = -1
            remove_tree(Path(self._links_path))

    def link(self, entry: Entry, target: int) -> None:
        names = {"src_dir_fd": entry.parent, "dst_dir_fd": target}
        try:
            os.link(entry.name, entry.name, **names, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            self.copy(entry, target)  # it has as many names as it can: an overlay's whiteouts are one file

    def copy(self, entry: Entry, target: int) -> None:
        info, name = entry.info, entry.name
        number = f"{info.st_dev:x}-{info.st_ino:x}" if info.st_nlink > 1 else None
        if number is not None and self._links >= 0:
            try:
                os.link(number, name, src_dir_fd=self._links, dst_dir_fd=target, follow_symlinks=False)
                return
            except FileNotFoundError:
                pass  # its first name
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                os.unlink(number, dir_fd=self._links)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFREG:
            _copy_file(name, entry.parent, target)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=entry.parent), name, dir_fd=target)
        elif kind == stat.S_IFCHR and info.st_rdev == _WHITEOUT:
            os.mknod(name, stat.S_IFCHR, _WHITEOUT, dir_fd=target)
        elif kind == stat.S_IFIFO:
            os.mkfifo(name, 0o600, dir_fd=target)
        elif kind == stat.S_IFSOCK:  # nobody listens, but it hides what has this name in a layer below
            os.mknod(name, stat.S_IFSOCK | 0o600, dir_fd=target)
        else:
            return  # a device: no sandbox can make one
        if kind in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK):
            _finish_special(name, target, info)
        if number is not None:
            self._remember(number, name, target)

    def _remember(self, number: str, name: str, target: int) -> None:
        if self._links < 0:
            os.mkdir(self._links_path, 0o700)
            self._links = os.open(self._links_path, DIRECTORY)
        # Not there any more: swapped while it was looked at, and not copied.
        with contextlib.suppress(FileNotFoundError):
            os.link(name, number, src_dir_fd=target, dst_dir_fd=self._links, follow_symlinks=False)


def finish_directory(source: int, target: int, info: os.stat_result) -> None:
    """What a directory gets once it is full."""
    _attributes(source, target)
    _own(target, info)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_file(name: str, source: int, target: int) -> None:
    fd = os.open(name, _FILE, dir_fd=source)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return  # swapped since it was looked at
        into = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target
        )
        try:
            copy_data(fd, into)
            _attributes(fd, into)
            _own(into, info)
            os.utime(into, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(into)
    finally:
        os.close(fd)


def _finish_special(name: str, target: int, info: os.stat_result) -> None:
    """What cannot be opened: a link, a pipe with a name, a socket."""
    if os.geteuid() == 0:
        os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)
    os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _attributes(source: int, target: int) -> None:
    for name in os.listxattr(source):
        if name.startswith(ATTRIBUTES):
            with contextlib.suppress(OSError):
                os.setxattr(target, name, os.getxattr(source, name))


def _own(target: int, info: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.fchown(target, info.st_uid, info.st_gid)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
