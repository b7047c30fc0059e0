"""What runs inside in place of the service's own file program: one operation, as JSON in its only argument.

It is handed to ``python -I -S -c`` as text, so it imports nothing but the standard library. Data goes over
standard input and output; an error is JSON on standard error and the exit code 1.
"""

import contextlib
import ctypes
import errno
import grp
import json
import os
import pwd
import select
import shutil
import stat
import struct
import sys
import time
from typing import Any, NoReturn

LARGEST = 5 << 30
KINDS = {
    errno.ENOENT: "NotFound",
    errno.EISDIR: "IsDirectory",
    errno.ENOTDIR: "NotDirectory",
    errno.EEXIST: "PathAlreadyExists",
    errno.EACCES: "PermissionDenied",
    errno.EPERM: "PermissionDenied",
    errno.EROFS: "PermissionDenied",
    errno.ENOTEMPTY: "DirectoryNotEmpty",
}
EVENTS = (
    (0x100, "Create"),
    (0x200 | 0x400, "Remove"),
    (0x40, "RenameFrom"),
    (0x80, "RenameTo"),
    (0x2 | 0x4, "Modify"),
    (0x1, "Access"),
)
IS_DIRECTORY, MASK = 0x40000000, 0x1 | 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400


def fail(kind: str, message: str) -> NoReturn:
    sys.stderr.write(json.dumps({"error_kind": kind, "message": message}))
    sys.stderr.flush()
    os._exit(1)


def name_of(table: Any, number: int) -> str:
    try:
        return str(table(number)[0])
    except KeyError:
        return str(number)


def entry(path: str) -> dict[str, Any]:
    info = os.lstat(path)
    kind = "symlink" if stat.S_ISLNK(info.st_mode) else "directory" if stat.S_ISDIR(info.st_mode) else "file"
    return {
        "name": os.path.basename(path.rstrip("/")) or "/",
        "path": path,
        "type": kind,
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "permissions": stat.filemode(info.st_mode)[1:],
        "owner": name_of(pwd.getpwuid, info.st_uid),
        "group": name_of(grp.getgrgid, info.st_gid),
        "modified_time": info.st_mtime,
        "symlink_target": os.readlink(path) if kind == "symlink" else None,
    }


def read_file(path: str) -> None:
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            fail("FileTooLarge", "the file is too large")
        while data := file.read(1 << 18):
            sys.stdout.buffer.write(data)
    sys.stdout.flush()


def write_file(path: str) -> None:
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except FileExistsError:
        fail("NotDirectory", "a parent is not a directory")
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 18)


def list_files(path: str) -> None:
    with os.scandir(path) as found:
        names = sorted(one.name for one in found)
    sys.stdout.write(json.dumps([entry(os.path.join(path, name)) for name in names]))


def stat_file(path: str) -> None:
    sys.stdout.write(json.dumps(entry(path)))


def make_directory(path: str, parents: bool = True) -> None:
    if not parents:
        os.mkdir(path)
        return
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        if os.path.lexists(path):
            raise
        fail("NotDirectory", "a parent is not a directory")


def remove(path: str, recursive: bool = False) -> None:
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
    elif recursive:
        shutil.rmtree(path)
    else:
        os.rmdir(path)


def watch(
    path: str, recursive: bool = False, filter: list[str] | None = None, timeout_secs: float | None = None
) -> None:
    os.lstat(path)
    libc = ctypes.CDLL(None, use_errno=True)
    inotify = libc.inotify_init1(0o2000000)
    paths: dict[int, str] = {}

    def add(directory: str) -> None:
        number = libc.inotify_add_watch(inotify, os.fsencode(directory), MASK)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        paths[number] = directory
        if recursive and os.path.isdir(directory):
            for one in os.scandir(directory):
                if one.is_dir(follow_symlinks=False):
                    add(one.path)

    add(path)
    until = time.monotonic() + timeout_secs if timeout_secs is not None else None
    while until is None or time.monotonic() < until:
        left = None if until is None else max(0.0, until - time.monotonic())
        ready, _, _ = select.select([inotify, 0], [], [], left)
        if 0 in ready and not os.read(0, 4096):
            return
        if inotify not in ready:
            continue
        data, at = os.read(inotify, 1 << 16), 0
        while at < len(data):
            number, mask, _, length = struct.unpack_from("iIII", data, at)
            name = os.fsdecode(data[at + 16 : at + 16 + length].rstrip(b"\0"))
            at += 16 + length
            where = os.path.join(paths.get(number, path), name) if name else paths.get(number, path)
            if mask & IS_DIRECTORY and mask & (0x100 | 0x80) and recursive:
                with contextlib.suppress(OSError):
                    add(where)
            kind = next((word for bits, word in EVENTS if mask & bits), None)
            if kind and (filter is None or kind in filter):
                sys.stdout.write(json.dumps({"event_type": kind, "paths": [where]}) + "\n")
                sys.stdout.flush()


def main() -> None:
    try:
        ((name, fields),) = json.loads(sys.argv[1]).items()
        operation: Any = {
            "ReadFile": read_file,
            "WriteFile": write_file,
            "ListFiles": list_files,
            "Stat": stat_file,
            "MakeDirectory": make_directory,
            "Remove": remove,
            "Watch": watch,
        }[name]
    except (ValueError, KeyError, AttributeError, IndexError):
        fail("Unknown", "no such operation")
    try:
        operation(**fields)
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        fail(KINDS.get(error.errno or 0, "Other"), error.strerror or "failed")
    except TypeError:
        fail("Unknown", "wrong fields")


main()
