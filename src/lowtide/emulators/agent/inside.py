"""What runs inside the sandbox, as one user: file operations and watches, framed over stdin and stdout.

It is handed to ``python -I -S -c`` as text, after that of `inside_watch`, so it imports nothing but the standard library and needs
no file in the sandbox. Frame, both ways: three big-endian u32 (length of what follows, request id,
length of the JSON part), the JSON, then raw bytes. Frames with id 0 are events nobody asked for.
Bulk data is pulled and pushed in bounded pieces, each answered, so one slow transfer holds up nothing.
"""

import contextlib
import ctypes
import errno
import grp
import json
import os
import pwd
import select
import stat
import struct
import sys
from typing import Any

from lowtide.emulators.agent.inside_watch import Watch

HEAD = struct.Struct(">III")
LARGEST = 8 << 20
MOST_ENTRIES = 50_000  # of one list: it is made in one piece, and everybody else waits for it
XATTR = "user.e2b."
EARLIEST_NS, LATEST_NS = -62_135_596_800 * 10**9, 253_402_300_799 * 10**9
"""The years 1 to 9999: whoever owns a file may say that it is of another one, and nobody could write that down."""

ctypes.CDLL(None).prctl(
    4, 0, 0, 0, 0
)  # not dumpable: other processes of this user get no hold of our streams


class Refused(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


# ---------------------------------------------------------------- files


def resolve(path: str, home: str) -> str:
    if path.startswith("~"):
        if path[1:2] not in ("", "/"):
            raise Refused("invalid", "cannot expand user-specific home dir")
        path = home + path[1:]
    return os.path.normpath(os.path.join(home, path)) if path else home


def name_of(table: Any, number: int) -> str:
    try:
        return str(table(number)[0])
    except KeyError:
        return str(number)


def entry(path: str) -> dict[str, Any]:
    info = os.lstat(path)
    target = None
    seen: os.stat_result | None = info
    if stat.S_ISLNK(info.st_mode):
        target = os.path.realpath(path)
        try:
            seen = os.stat(path)
        except OSError:
            target, seen = path, None
    kind = "other"
    if seen is not None and stat.S_ISDIR(seen.st_mode):
        kind = "directory"
    elif seen is not None and stat.S_ISREG(seen.st_mode):
        kind = "file"
    return {
        "name": os.path.basename(path) or "/",
        "path": path,
        "kind": kind,
        "size": info.st_size,
        "mode": stat.S_IMODE(seen.st_mode) & 0o777 if seen is not None else 0,
        "permissions": permissions(info.st_mode),
        "owner": name_of(pwd.getpwuid, info.st_uid),
        "group": name_of(grp.getgrgid, info.st_gid),
        "modified_ns": min(max(info.st_mtime_ns, EARLIEST_NS), LATEST_NS),
        "target": target,
        "metadata": metadata_of(path),
    }


def permissions(mode: int) -> str:
    text = stat.filemode(mode)
    return ("L" if text[0] == "l" else text[0]) + text[1:]


def metadata_of(path: str) -> dict[str, str]:
    try:
        names = [n for n in os.listxattr(path) if n.startswith(XATTR)]
        return {n[len(XATTR) :]: os.getxattr(path, n).decode("utf-8", "replace") for n in names}
    except OSError:
        return {}


def ensure_directories(path: str) -> None:
    missing = []
    while path != "/":
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise Refused("not-a-directory", f"path is a file: {path}")
            break
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(one, 0o755)


def op_open_way(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Make the first missing directory on the way to a path, and let everybody write there."""
    path, missing = resolve(ask["path"], ask["home"]), ""
    while path != "/" and not os.path.lexists(path):
        path, missing = os.path.dirname(path), path
    if missing:
        os.mkdir(missing)
        os.chmod(missing, 0o777)  # noqa: S103 - inside the sandbox, in place of giving it to the user
    return {"made": bool(missing)}, b""


def op_stat(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    return {"entry": entry(resolve(ask["path"], ask["home"]))}, b""


def op_list(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    root = resolve(ask["path"], ask["home"])
    if not stat.S_ISDIR(os.stat(root).st_mode):
        raise Refused("not-a-directory", f"path is not a directory: {root}")
    found: list[dict[str, Any]] = []

    def walk(directory: str, shown: str, depth: int) -> None:
        for name in sorted(os.listdir(directory)):
            try:
                one = entry(os.path.join(directory, name))
            except FileNotFoundError:
                continue
            one["path"] = os.path.join(shown, name)
            found.append(one)
            if len(found) > MOST_ENTRIES:
                raise Refused("too-many", f"more than {MOST_ENTRIES} entries under {root}")
            if depth > 1 and one["kind"] == "directory" and one["target"] is None:
                with contextlib.suppress(PermissionError):
                    walk(os.path.join(directory, name), one["path"], depth - 1)

    walk(os.path.realpath(root), root, max(1, ask.get("depth") or 1))
    return {"entries": found}, b""


def op_mkdir(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    path = resolve(ask["path"], ask["home"])
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise Refused("exists", f"directory already exists: {path}")
        raise Refused("not-a-directory", f"path already exists but it is not a directory: {path}")
    except FileNotFoundError:
        ensure_directories(path)
    if ask.get("mode") is not None:
        os.chmod(path, ask["mode"])
    return {"entry": entry(path)}, b""


def op_move(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    source, destination = (resolve(ask[k], ask["home"]) for k in ("source", "destination"))
    os.lstat(source)
    ensure_directories(os.path.dirname(destination))
    os.rename(source, destination)
    return {"entry": entry(destination)}, b""


def op_remove(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    remove_tree(resolve(ask["path"], ask["home"]))
    return {}, b""


def remove_tree(path: str) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for name in os.listdir(path):
                remove_tree(os.path.join(path, name))
            os.rmdir(path)
        else:
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def op_chmod(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    path = resolve(ask["path"], ask["home"])
    if ask.get("mode") is not None:
        os.chmod(path, ask["mode"])
    if ask.get("owner") or ask.get("group"):
        uid = pwd.getpwnam(ask["owner"]).pw_uid if ask.get("owner") else -1
        gid = grp.getgrnam(ask["group"]).gr_gid if ask.get("group") else -1
        os.chown(path, uid, gid)
    return {}, b""


open_files: dict[int, int] = {}


def op_open_read(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    path = resolve(ask["path"], ask["home"])
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        os.close(fd)
        raise Refused("is-a-directory", f"path '{path}' is a directory")
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        os.close(fd)
        raise Refused("invalid", f"path '{path}' is not a regular file")
    open_files[fd] = fd
    # Files of /proc say 0 whatever they hold, so a first piece always comes along.
    first = os.read(fd, min(LARGEST, ask.get("length", 1 << 20)))
    return {"handle": fd, "path": path, "size": os.fstat(fd).st_size}, first


def op_read(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    return {}, os.read(open_files[ask["handle"]], min(LARGEST, ask.get("length", 1 << 20)))


def op_close(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    fd = open_files.pop(ask["handle"], None)
    if fd is not None:
        os.close(fd)
    return {}, b""


def op_open_write(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    path = resolve(ask["path"], ask["home"])
    ensure_directories(os.path.dirname(path))
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise Refused("is-a-directory", f"path is a directory: {path}")
        existed = True
    except FileNotFoundError:
        existed = False
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(path, flags, 0o666)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        os.close(fd)
        raise Refused("invalid", f"path '{path}' is not a regular file")
    if not existed:
        os.fchown(fd, os.getuid(), os.getgid())
    open_files[fd] = fd
    write_all(fd, data)
    return {"handle": fd, "path": path}, b""


def op_write(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    write_all(open_files[ask["handle"]], data)
    return {}, b""


def op_finish(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """The end of a write: what was there before keeps none of its metadata."""
    fd = open_files.pop(ask["handle"])
    try:
        wanted = ask.get("metadata") or {}
        for name in os.listxattr(fd):
            if name.startswith(XATTR) and name[len(XATTR) :] not in wanted:
                os.removexattr(fd, name)
        for key, value in wanted.items():
            os.setxattr(fd, XATTR + key, value.encode())
        if ask.get("mode") is not None:
            os.fchmod(fd, ask["mode"])
        found = metadata_of(f"/proc/self/fd/{fd}")
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EACCES):
            raise
        found = {}
    finally:
        os.close(fd)
    return {"metadata": found}, b""


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# ---------------------------------------------------------------- watching


watches: dict[int, Watch] = {}


def op_watch(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    root = resolve(ask["path"], ask["home"])
    if not stat.S_ISDIR(os.stat(root).st_mode):
        raise Refused("not-a-directory", f"path {root} not a directory")
    watch = Watch(root, bool(ask.get("recursive")), entry if ask.get("entry") else None)
    watches[watch.fd] = watch
    return {"watch": watch.fd}, b""


def op_events(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    watch = watches.get(ask["watch"])
    if watch is None:
        raise Refused("missing", "watcher not found")
    return {"events": watch.drain()}, b""


def op_unwatch(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    watch = watches.pop(ask["watch"], None)
    if watch is not None:
        os.close(watch.fd)
    return {}, b""


# ---------------------------------------------------------------- the loop


def answer(number: int, head: dict[str, Any], data: bytes = b"") -> None:
    # Names that are not UTF-8 go as they are: whoever reads this writes marks in their place, as the services do.
    text = json.dumps(head, ensure_ascii=False).encode("utf-8", "surrogateescape")
    write_all(1, HEAD.pack(len(text) + len(data), number, len(text)) + text + data)


def serve(number: int, ask: dict[str, Any], data: bytes) -> None:
    try:
        head, found = OPERATIONS[ask["op"]](ask, data)
        answer(number, head, found)
    except Refused as error:
        answer(number, {"error": error.kind, "message": str(error)})
    except OSError as error:
        message = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        answer(number, {"error": errno.errorcode.get(error.errno or 0, "EIO"), "message": message})
    except Exception as error:
        answer(number, {"error": "invalid", "message": f"{type(error).__name__}: {error}"})


def read_exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            sys.exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    os.umask(0o022)
    while True:
        ready, _, _ = select.select([0, *watches], [], [])
        for fd in ready:
            if fd != 0 and fd in watches:
                # Watches first: a directory made by the request before needs its own watch by now.
                watch = watches[fd]
                events = watch.drain()
                if events:
                    answer(0, {"watch": fd, "events": events})
        if 0 in ready:
            size, number, length = HEAD.unpack(read_exactly(HEAD.size))
            payload = read_exactly(size)
            serve(number, json.loads(payload[:length]), payload[length:])


OPERATIONS = {name[3:]: thing for name, thing in list(globals().items()) if name.startswith("op_")}

if __name__ == "__main__":
    main()
