"""After a fork: gRPC loaded anew, because what was loaded before does not survive one.

gRPC's threads and locks belong to the process that started them. In a forked child they do not exist, and
every call would wait for them for ever. So a child whose parent has used gRPC loads its library a second
time, from a copy, which has a state of its own. The first one stays where it is and is never touched again.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# Its own handling of forks prints a line at every one, and starts threads in a child whose state is half a parent's,
# which crash. It is asked for when gRPC is first used: so here, and not where we use it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_EXTENSION = "grpc._cython.cygrpc"
_broken = False
_library: str | None = None
_left: list[dict[str, ModuleType]] = []
"""What the parent used. Kept, because letting go of it would call into it."""


def grpc() -> Any:
    """The module `grpc`, usable in this process."""
    global _broken, _library
    if _broken:
        old = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "grpc"}
        _left.append(old)
        _library = _library or old[_EXTENSION].__file__
        assert _library is not None
        with _copy(_library) as path:
            finder = _Finder(path)
            sys.meta_path.insert(0, finder)
            try:
                import grpc.aio
            finally:
                sys.meta_path.remove(finder)
        _broken = False
    import grpc.aio

    return grpc


def rpc_error() -> type[Exception]:
    """What calls raise here."""
    kind: type[Exception] = grpc().RpcError
    return kind


class _Finder:
    """Finds the library in its copy."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _EXTENSION:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, self._path)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


@contextmanager
def _copy(library: str) -> Iterator[str]:
    """Another file with the same content: the same one would be the same library."""
    if hasattr(os, "memfd_create"):  # needs no directory from which programs may run
        descriptor = os.memfd_create("lowtide-grpc", os.MFD_CLOEXEC)
        path = f"/proc/self/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(suffix=".so")
    try:
        with open(library, "rb") as source, open(descriptor, "wb", closefd=False) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        yield path
    finally:
        os.close(descriptor)
        if not path.startswith("/proc/"):
            os.unlink(path)


def _notice() -> None:
    global _broken
    _broken = _EXTENSION in sys.modules


os.register_at_fork(after_in_child=_notice)
