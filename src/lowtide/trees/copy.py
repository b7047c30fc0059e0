"""Copying a layer that hostile code may still be writing: no link is followed, nothing but the layer is read."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WHITEOUT = 0  # device 0/0: how an overlay says "deleted"


def copy_tree(source: str, target: str) -> None:
    """Owners, modes, times, whiteouts, extended attributes, hard links and holes included."""
    top = os.open(source, _DIRECTORY)
    try:
        os.mkdir(target, 0o700)
        into = os.open(target, _DIRECTORY)
        try:
            _copy_directory(top, into, into, "", {})
        finally:
            os.close(into)
    finally:
        os.close(top)


def _copy_directory(
    source: int, target: int, top: int, path: str, linked: dict[tuple[int, int], str]
) -> None:
    with os.scandir(source) as found:
        names = [item.name for item in found]
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            _copy_entry(name, source, target, top, f"{path}/{name}" if path else name, linked)
    info = os.fstat(source)
    _attributes(source, target)
    _own(target, info)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_entry(
    name: str, source: int, target: int, top: int, path: str, linked: dict[tuple[int, int], str]
) -> None:
    info = os.lstat(name, dir_fd=source)
    kind = stat.S_IFMT(info.st_mode)
    if kind == stat.S_IFDIR:
        fd = os.open(name, _DIRECTORY, dir_fd=source)
        try:
            os.mkdir(name, 0o700, dir_fd=target)
            into = os.open(name, _DIRECTORY, dir_fd=target)
            try:
                _copy_directory(fd, into, top, path, linked)
            finally:
                os.close(into)
        finally:
            os.close(fd)
        return
    first = linked.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 else None
    if first is not None:
        os.link(first, name, src_dir_fd=top, dst_dir_fd=target, follow_symlinks=False)
        return
    if kind == stat.S_IFREG:
        _copy_file(name, source, target)
    elif kind == stat.S_IFLNK:
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        if os.geteuid() == 0:
            os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
    elif kind == stat.S_IFCHR and info.st_rdev == _WHITEOUT:
        os.mknod(name, stat.S_IFCHR, _WHITEOUT, dir_fd=target)
    elif kind == stat.S_IFIFO:
        os.mkfifo(name, stat.S_IMODE(info.st_mode), dir_fd=target)
    else:
        return  # a socket or a device: means nothing without the process behind it
    if info.st_nlink > 1:
        linked[info.st_dev, info.st_ino] = path


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
            _copy_data(fd, into, info.st_size)
            _attributes(fd, into)
            _own(into, info)
            os.utime(into, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(into)
    finally:
        os.close(fd)


def _copy_data(source: int, target: int, size: int) -> None:
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
            end = os.lseek(source, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # only a hole is left
            raise
        while start < end:
            count = _some(source, target, start, end - start)
            if not count:
                break
            start += count
        at = end
    os.ftruncate(target, size)


def _some(source: int, target: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, min(count, 1 << 30), at, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return os.pwrite(target, os.pread(source, min(count, 1 << 20), at), at)


def _attributes(source: int, target: int) -> None:
    for name in os.listxattr(source):
        if name.startswith("user."):
            with contextlib.suppress(OSError):
                os.setxattr(target, name, os.getxattr(source, name))


def _own(target: int, info: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.fchown(target, info.st_uid, info.st_gid)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
