"""Calls answered from inside a sandbox, with its own rights: files, directories, sockets."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import time

from . import trees
from .open_file import SAFE, open_regular
from .restrictions import enter, restrict
from .wire import Fds, Message, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def call_inside(message: Message, fds: Fds) -> int:
    """Fork one that enters and answers one file call with the sandbox's own rights.

    It stays out of the sandbox's process namespace: nothing in there sees it or can touch it.
    """
    work = CALLS[message["call"]]
    if message["call"] in ("read_tree", "write_tree", "remove"):
        trees.load()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        enter(fds[1], message["cgroups"], message["flags"])
        restrict(0, 0, 0, runs_nothing=True)
        work(message, fds)
    except OSError as error:
        answer: Message = {"errno": error.errno or errno.EIO, "why": error.strerror or str(error)}
        if isinstance(error.filename, str) and not error.filename.startswith("/"):
            answer["below"] = error.filename[:4000]  # what of a tree it is about
        send(fds[0], answer)
    except BaseException as error:
        send(fds[0], {"errno": errno.EIO, "why": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def call_read(message: Message, fds: Fds) -> None:
    # Asked first, because opening a device can already do something.
    mode = os.stat(message["path"]).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file")
    fd = open_regular(message["path"], os.O_RDONLY)
    send(fds[0], {"size": os.fstat(fd).st_size}, [fd])


def call_write(message: Message, fds: Fds) -> None:
    """Open a new file beside the target, hand it out, and put it in its place once the caller says so."""
    path = os.path.realpath(message["path"]) if os.path.islink(message["path"]) else message["path"]
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        there = None
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if there is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    mode = message["mode"]
    if mode is None:
        mode = stat.S_IMODE(there.st_mode) if there is not None else 0o644
    folder, name = os.path.split(path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    os.makedirs(folder or "/", 0o755, exist_ok=True)
    # Everything from here on happens in the directory that is open now, whatever its path becomes.
    place = os.open(folder or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f".lowtide-{os.getpid()}-{time.monotonic_ns()}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | SAFE, 0o600, dir_fd=place)
    done = False
    try:
        os.fchmod(fd, mode)
        send(fds[0], {"ok": True}, [fd])
        said = os.read(fds[0], 1)
        if mode & 0o6000:
            os.fchmod(fd, mode)  # again: who writes without CAP_FSETID loses the set-id bits
        os.close(fd)  # a program that somebody has open for writing cannot be run
        if said == b"C":
            os.rename(temporary, name, src_dir_fd=place, dst_dir_fd=place)
            done = True
            send(fds[0], {"ok": True})
    finally:
        if not done:
            os.unlink(temporary, dir_fd=place)


def entry(path: str, name: str) -> list[Any]:
    info = os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    return [name, info.st_mode, info.st_size, info.st_mtime, target]


def call_stat(message: Message, fds: Fds) -> None:
    send(fds[0], {"entry": entry(message["path"], os.path.basename(message["path"].rstrip("/")) or "/")})


def call_list(message: Message, fds: Fds) -> None:
    path = message["path"]
    out = os.fdopen(fds[2], "w", encoding="utf-8", errors="strict")
    with os.scandir(path) as found:
        for item in found:
            try:
                out.write(json.dumps(entry(item.path, item.name)) + "\n")
            except FileNotFoundError:
                continue  # went away meanwhile
    out.close()
    send(fds[0], {"ok": True})


def call_make_dir(message: Message, fds: Fds) -> None:
    os.makedirs(message["path"], 0o755, exist_ok=True)
    send(fds[0], {"ok": True})


def call_remove(message: Message, fds: Fds) -> None:
    path = message["path"].rstrip("/") or "/"
    mode = os.lstat(path).st_mode
    if os.path.basename(path) in (".", ".."):
        raise OSError(errno.EINVAL, "not what it is called in its directory: give that path")
    if not stat.S_ISDIR(mode):
        os.unlink(path)
    elif not message["recursive"]:
        os.rmdir(path)
    else:
        parent = os.open(os.path.dirname(path) or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        trees.remove.remove_at(parent, os.path.basename(path))
    send(fds[0], {"ok": True})


def call_sockets(message: Message, fds: Fds) -> None:
    """Unconnected sockets of the sandbox's network, to be connected from outside."""
    made = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            made.append(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        except OSError:
            continue
    send(fds[0], {"ok": True}, [s.fileno() for s in made])


CALLS = {
    "read": call_read,
    "write": call_write,
    "stat": call_stat,
    "list": call_list,
    "make_dir": call_make_dir,
    "remove": call_remove,
    "read_tree": trees.call_read_tree,
    "write_tree": trees.call_write_tree,
    "sockets": call_sockets,
}
