"""Whole directories of a sandbox as a tar stream, packed and unpacked inside."""

from __future__ import annotations

import errno
import os
import stat

from .open_file import open_regular
from .wire import Fds, Message, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

tarfile: Any = None  # the module, once a tree was asked for
Tree: Any = None


walk: Any = None  # the same as everywhere else, once it was asked for
LONGEST_PATH = 4096


def load(tar: bool) -> None:
    global walk
    if walk is None:
        walk = load_walk()
    if tar and tarfile is None:
        load_tarfile()


def load_walk() -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    package = os.path.dirname(os.path.abspath(__file__))
    file = os.path.join(package, *[os.pardir] * 3, "trees", "walk.py")
    spec: Any = spec_from_file_location("walk", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.walk


def load_tarfile() -> None:
    global tarfile, Tree
    import tarfile as module

    # Names of users come from libraries that glibc would load inside, from the sandbox. Ids are enough.
    vars(module).update(pwd=None, grp=None)

    class OwnTree(module.TarFile):
        def chown(self, *args: object, **kwargs: object) -> None:
            """What is unpacked belongs to the sandbox's user."""

        def makedev(self, member: object, path: object) -> None:
            raise module.ExtractError("devices cannot be made in a sandbox")

    tarfile, Tree = module, OwnTree


def call_read_tree(message: Message, fds: Fds) -> None:
    path = message["path"]
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    with (
        os.fdopen(fds[2], "wb", buffering=1 << 18) as out,
        Tree.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar,
    ):
        pack(tar, path)
    send(fds[0], {"ok": True})


def pack(tar: Any, path: str) -> None:
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    folders: list[str] = []
    device, elsewhere = os.fstat(top).st_dev, 0
    for entry in walk(top):
        if entry.left:
            folders.pop()
            elsewhere -= 1 if elsewhere else 0
            continue
        if entry.own >= 0:
            folders.append(entry.name)
        if elsewhere or (entry.own >= 0 and entry.info.st_dev != device):
            elsewhere += 1 if entry.own >= 0 else 0
            continue  # a mount: this machine's Python, /proc
        pack_entry(tar, entry, "/".join(folders if entry.own >= 0 else [*folders, entry.name]))


def pack_entry(tar: Any, entry: Any, name: str) -> None:
    mode = entry.info.st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        return
    if len(name) > LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, f"a path in it is longer than {LONGEST_PATH} characters")
    os.fchdir(entry.parent)  # and no path: it may be longer than a path can be
    try:
        member = tar.gettarinfo(entry.name, name)
    except FileNotFoundError:
        return
    if member is None:
        return
    member.uid = member.gid = 0
    if not member.isreg():
        tar.addfile(member)
        return
    fd = open_regular(entry.name, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        member.size = size
        tar.addfile(member, Padded(file, size))


class Padded:
    """A file that may shrink while it is packed: the archive stays whole."""

    def __init__(self, file: Any, size: int) -> None:
        self.file, self.left = file, size

    def read(self, count: int) -> bytes:
        count = min(count, self.left)
        data: bytes = self.file.read(count)
        self.left -= count
        return data + bytes(count - len(data))


def call_write_tree(message: Message, fds: Fds) -> None:
    os.makedirs(message["path"], 0o755, exist_ok=True)
    os.chdir(message["path"])
    try:
        with os.fdopen(fds[2], "rb", buffering=1 << 18) as source:
            with Tree.open(fileobj=source, mode="r|", errors="surrogateescape", errorlevel=1) as tar:
                tar.extraction_filter = staticmethod(lambda member, _path: member)
                for member in tar:
                    name = os.path.normpath("/" + member.name).lstrip("/")
                    if not name:
                        continue
                    member.name = name
                    if member.ischr() or member.isblk():
                        continue
                    tar.extract(member, ".", set_attrs=True)
            while source.read(1 << 18):
                pass
    except tarfile.TarError as error:
        raise OSError(errno.EINVAL, f"not a whole tar archive: {error}") from None
    send(fds[0], {"ok": True})
