"""Unpacking an image layer: nothing leaves its directory, deletions become overlay whiteouts, ids are shifted."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import struct
import tarfile
from typing import IO

from lowtide.errors import ValidationError
from lowtide.trees.remove import remove_at

_OPENAT2 = 437
_IN_ROOT, _NO_MAGICLINKS = 0x10, 0x02
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


def unpack_layer(stream: IO[bytes], target: str, owner: int | None) -> None:
    """`owner`: the id that 0 becomes; None keeps everything this user's."""
    os.mkdir(target, 0o755)
    root = os.open(target, _DIRECTORY)
    try:
        if owner is not None:
            os.fchown(root, owner, owner)
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            for member in archive:
                _unpack(archive, member, root, owner)
    finally:
        os.close(root)


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, root: int, owner: int | None) -> None:
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in member.name:
        raise ValidationError(
            f"the layer names a path outside itself: {member.name!r}", argument="file", provider="local"
        )
    if not parts:
        return
    folder = _open_directory(root, parts[:-1], owner)
    name = parts[-1]
    try:
        if name == ".wh..wh..opq":
            os.setxattr(folder, "user.overlay.opaque", b"y")
        elif name.startswith(".wh."):
            remove_at(folder, name[4:])
            os.mknod(name[4:], stat.S_IFCHR, 0, dir_fd=folder)
        else:
            _make(archive, member, root, folder, name, owner)
    finally:
        os.close(folder)


def _make(
    archive: tarfile.TarFile, member: tarfile.TarInfo, root: int, folder: int, name: str, owner: int | None
) -> None:
    mode = member.mode & (0o7777 if owner is not None else 0o1777)
    if member.isdir():
        _make_directory(folder, name, mode, member, owner)
        return
    remove_at(folder, name)
    if member.isreg():
        source = archive.extractfile(member)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=folder), "wb", buffering=0) as file:
            if source is not None:
                shutil.copyfileobj(source, file, 1 << 20)
            _own(file.fileno(), member, owner)
            os.fchmod(file.fileno(), mode)
            os.utime(file.fileno(), (member.mtime, member.mtime))
    elif member.issym():
        os.symlink(member.linkname, name, dir_fd=folder)
        if owner is not None:
            ids = _ids(member, owner)
            os.chown(name, *ids, dir_fd=folder, follow_symlinks=False)
    elif member.islnk():
        parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            raise ValidationError(
                f"a hard link leads outside the layer: {member.name!r}", argument="file", provider="local"
            )
        there = _open_directory(root, parts[:-1], owner)
        try:
            os.link(parts[-1], name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(there)
    elif member.isfifo():
        os.mkfifo(name, mode, dir_fd=folder)
    # Devices are left out: a sandbox gets its own /dev.


def _make_directory(folder: int, name: str, mode: int, member: tarfile.TarInfo, owner: int | None) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
            os.mkdir(name, 0o755, dir_fd=folder)
    fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        _own(fd, member, owner)
        os.fchmod(fd, mode if owner is not None else mode | 0o700)
    finally:
        os.close(fd)


def _own(fd: int, member: tarfile.TarInfo, owner: int | None) -> None:
    if owner is not None:
        os.fchown(fd, *_ids(member, owner))


def _ids(member: tarfile.TarInfo, owner: int) -> tuple[int, int]:
    uid, gid = (value if 0 <= value < 65536 else 65534 for value in (member.uid, member.gid))
    return owner + uid, owner + gid


def _open_directory(root: int, parts: list[str], owner: int | None) -> int:
    """The directory at that path, made where it is missing. Links in the layer lead inside the layer only."""
    try:
        return _inside(root, "/".join(parts) or ".")
    except FileNotFoundError:
        parent = _open_directory(root, parts[:-1], owner)
        try:
            try:
                os.mkdir(parts[-1], 0o755, dir_fd=parent)
            except FileExistsError:
                raise ValidationError(
                    f"the layer puts files behind a link that leads nowhere: {'/'.join(parts)!r}",
                    argument="file",
                    provider="local",
                ) from None
            fd = os.open(parts[-1], _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
        if owner is not None:
            os.fchown(fd, owner, owner)
        return fd


def _inside(root: int, path: str) -> int:
    how = struct.pack("QQQ", _DIRECTORY, 0, _IN_ROOT | _NO_MAGICLINKS)
    fd: int = _libc.syscall(_OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return fd
