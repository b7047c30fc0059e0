"""What a sandbox sees of the Python that runs lowtide: its programs, its library and packages, and nothing private.

A virtual environment is somebody's directory. Only `bin` and `lib` of it are shown, each as the lower layer of a
read-only overlay: a socket in an overlay is not the socket that somebody listens on. Files that only their owner may
read are not readable inside: as root because their owner has no id in there, and for an ordinary user, who is the
owner, because a layer above hides them where they lie beside what is public. That layer is made for each sandbox by the
modes that the files have when it is created; a running sandbox sees what becomes private later.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

_PARTS = ("bin", "lib", "lib64", "lib32", "ssl")  # the last is where Conda has its certificates
_PUBLIC = 0o044


@dataclass(frozen=True, slots=True)
class ReadOnlyTree:
    """A tree of this machine, at the same path inside, under a layer that hides what is private in it."""

    path: str
    mask: str


def prefixes() -> tuple[str, ...]:
    """Where this Python is installed, and its virtual environment, as far as they are not in /usr."""
    found = dict.fromkeys((sys.base_prefix, sys.prefix, os.path.realpath(sys.base_prefix)))
    return tuple(p for p in found if p not in ("/", "", "/usr") and not p.startswith("/usr/"))


def trees() -> tuple[str, ...]:
    """The directories of them that are shown. One that only its owner may enter is not."""
    return tuple(
        path
        for prefix in prefixes()
        for path in (f"{prefix}/{part}" for part in _PARTS)
        if os.path.isdir(path) and not os.path.islink(path) and os.stat(path).st_mode & _PUBLIC
    )


def search_path() -> str:
    usual = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    bins = [f"{prefix}/bin" for prefix in (sys.prefix, sys.base_prefix)]
    return ":".join(dict.fromkeys([path for path in bins if path in trees()] + usual))


class Masks:
    """The layers that hide private files, made when they are needed and found by what they hide."""

    def __init__(self, directory: Path, owner: int | None) -> None:
        self._directory, self._owner = directory, owner
        self._trees = trees()

    def masked(self) -> tuple[ReadOnlyTree, ...]:
        """Every tree with its mask, by what its files' modes are now: a file's mode changes nothing but the file."""
        if self._owner is not None:
            # As root the owner of what is private has no id in the sandbox: nothing has to be hidden.
            return tuple(ReadOnlyTree(tree, self._mask([])) for tree in self._trees)
        now = trees()
        return tuple(ReadOnlyTree(tree, self._mask(_private(tree))) for tree in self._trees if tree in now)

    def _mask(self, names: list[str]) -> str:
        place = (
            self._directory
            / hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        )
        if not place.is_dir():
            draft = place.with_name(f".{place.name}.{os.getpid()}.{os.urandom(4).hex()}")
            draft.mkdir(mode=0o755, parents=True)
            draft.chmod(0o755)
            draft.parent.chmod(0o711)
            try:
                for name in names:
                    (draft / name).parent.mkdir(parents=True, exist_ok=True)
                    os.mknod(
                        draft / name, stat.S_IFCHR, os.makedev(0, 0)
                    )  # what an overlay takes for "not there"
                with contextlib.suppress(OSError):  # another process was first: that one is as good
                    draft.rename(place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return str(place)


def _looked_into(tree: str) -> list[str]:
    """Where people put files of their own: beside the programs, beside the library, among the packages."""
    library = f"{tree}/python{sys.version_info.major}.{sys.version_info.minor}"
    return [path for path in (tree, library, f"{library}/site-packages") if os.path.isdir(path)]


def _private(tree: str) -> list[str]:
    names = []
    for folder in _looked_into(tree):
        with os.scandir(folder) as found:
            for entry in found:
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except FileNotFoundError:
                    continue
                if not stat.S_ISLNK(mode) and not mode & _PUBLIC:
                    names.append(os.path.relpath(entry.path, tree))
    return sorted(names)
