"""Unpacking an image layer: nothing leaves its directory, deletions become overlay whiteouts, ids are shifted."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import lzma
import os
import stat
import struct
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, cast

from lowtide.errors import LowtideError, ResourceExhaustedError
from lowtide.providers.images.bounds import Budget
from lowtide.providers.images.content import Content
from lowtide.providers.images.documents import bad
from lowtide.trees.holes import finish, write_or_skip
from lowtide.trees.remove import remove_at
from lowtide.trees.tar import members, open_stream

_OPENAT2 = 437
_IN_ROOT, _NO_MAGICLINKS = 0x10, 0x02
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BLOCK = 1 << 20
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_libc = ctypes.CDLL(None, use_errno=True)


def unpack_layer(layer: IO[bytes], target: str, owner: int | None, budget: Budget) -> str:
    """The digest of its content. `owner`: the id that 0 becomes; None keeps everything this user's."""
    os.mkdir(target, 0o755)
    root = os.open(target, _DIRECTORY)
    try:
        os.fchmod(root, 0o755)  # whatever the program's umask is
        if owner is not None:
            os.fchown(root, owner, owner)
        content = Content(layer, budget)
        with open_stream(cast("IO[bytes]", content), _BLOCK) as archive:
            for member in members(archive):
                budget.entry()
                with _said_of(member.name):
                    _unpack(archive, member, root, owner)
        return content.digest()
    except LowtideError:
        raise
    except (
        OSError,
        EOFError,
        tarfile.TarError,
        zlib.error,
        lzma.LZMAError,
        ValueError,
        OverflowError,
    ) as error:
        raise bad(f"a layer is broken: {error}") from error
    finally:
        os.close(root)


@contextlib.contextmanager
def _said_of(name: str) -> Iterator[None]:
    """Whatever the system refuses of an entry is the layer's fault, unless the disk is full."""
    try:
        yield
    except LowtideError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceExhaustedError(f"the disk is full: {error.strerror}", provider="local") from error
        if error.errno is None:
            raise  # from reading the layer, and not from writing what it holds
        raise bad(f"{name[:200]!r} in a layer: {error.strerror}") from error


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, root: int, owner: int | None) -> None:
    parts = _parts(member.name)
    if parts is None:
        raise bad(f"a layer names a path outside itself: {member.name[:200]!r}")
    if not parts:
        return
    name = parts[-1]
    if name.startswith(_WHITEOUT) and name != _OPAQUE:
        if name.startswith(_WHITEOUT * 2):
            return  # what aufs kept for itself
        if name[len(_WHITEOUT) :] in ("", ".", ".."):
            raise bad(f"a layer deletes what is no name: {member.name[:200]!r}")
    folder = _open_directory(root, parts[:-1], owner)
    try:
        if name == _OPAQUE:
            os.setxattr(folder, "user.overlay.opaque", b"y")
        elif name.startswith(_WHITEOUT):
            remove_at(folder, name[len(_WHITEOUT) :])
            os.mknod(name[len(_WHITEOUT) :], stat.S_IFCHR, 0, dir_fd=folder)
        else:
            _make(archive, member, root, folder, name, owner)
    finally:
        os.close(folder)


def _parts(path: str) -> list[str] | None:
    """None: it leads outside."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return None if ".." in parts or "\0" in path else parts


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
            while source is not None and (block := source.read(_BLOCK)):
                write_or_skip(file, block)
            finish(file)
            _own(file.fileno(), member, owner)
            os.fchmod(file.fileno(), mode)
            with contextlib.suppress(ValueError, OverflowError):  # a time that no file can have
                os.utime(file.fileno(), (member.mtime, member.mtime))
    elif member.issym():
        os.symlink(member.linkname, name, dir_fd=folder)
        if owner is not None:
            ids = _ids(member, owner)
            os.chown(name, *ids, dir_fd=folder, follow_symlinks=False)
    elif member.islnk():
        parts = _parts(member.linkname)
        if not parts:
            raise bad(f"a hard link leads outside the layer: {member.name[:200]!r}")
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
    there = len(parts)
    while True:
        try:
            fd = _inside(root, "/".join(parts[:there]) or ".")
            break
        except FileNotFoundError:
            there -= 1
    for part in parts[there:]:
        parent = fd
        try:
            os.mkdir(part, 0o755, dir_fd=parent)
            fd = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except FileExistsError:
            raise bad(
                f"a layer puts files behind a link that leads nowhere: {'/'.join(parts)[:200]!r}"
            ) from None
        finally:
            os.close(parent)
        os.fchmod(fd, 0o755)
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
