"""Whole directories of a sandbox as a tar stream, packed and unpacked inside."""

from __future__ import annotations

import errno
import os
import stat
import sys

from .wire import Fds, Message, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

walk: Any = None  # `lowtide.trees`, the same as everywhere else, once it was asked for
pack: Any = None
unpack: Any = None
tar: Any = None
remove: Any = None


def load() -> None:
    """Before anything is entered: inside, it would come from the sandbox."""
    global walk, pack, unpack, tar, remove
    if walk is not None:
        return
    from importlib import import_module
    from importlib.util import module_from_spec, spec_from_file_location

    package = os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "trees")
    spec: Any = spec_from_file_location(
        "trees", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    sys.modules["trees"] = module_from_spec(spec)
    pack, unpack, tar, remove = (
        import_module(f"trees.{name}") for name in ("pack", "unpack", "tar_stream", "remove")
    )
    walk = import_module("trees.walk").walk


def call_read_tree(message: Message, fds: Fds) -> None:
    path = message["path"]
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    with os.fdopen(fds[2], "wb", buffering=1 << 18) as out:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        pack.Pack(out.write, marks=True, one_device=True).run(top)
    send(fds[0], {"ok": True})


def call_write_tree(message: Message, fds: Fds) -> None:
    os.makedirs(message["path"], 0o755, exist_ok=True)
    top = os.open(message["path"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.fdopen(fds[2], "rb", buffering=1 << 18) as source:
            unpack.Replacing(top).run(tar.Reader(source))
            while source.read(1 << 18):
                pass
    except tar.TarError as error:
        raise OSError(errno.EINVAL, f"not a whole tar archive: {error}") from None
    send(fds[0], {"ok": True})
