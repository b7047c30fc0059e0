"""Walking a tree without following a link: of any depth, with few descriptors, whatever its paths are long.

The spawner loads this file by its path: nothing is imported here that costs more than it needs.

Hostile code may have made the tree and may still be changing it. Each directory is opened from its parent; a
parent whose descriptor was given up is opened again as ``..`` and must be the one it was.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooLarge(Exception):
    """A file or a tree holds more than the caller accepts."""


class Entry:
    """Something in a directory. A directory comes twice: before what is in it, and with `left` after that."""

    __slots__ = ("info", "left", "name", "own", "parent")

    def __init__(
        self, parent: int, name: str, info: os.stat_result, own: int = -1, left: bool = False
    ) -> None:
        self.parent, self.name, self.info = parent, name, info
        """The open directory that it is in; what it is called there; what lstat says."""
        self.own = own
        """A directory's own descriptor, else -1."""
        self.left = left


class Position:
    """Where one is in a tree: an open directory, and the way back up."""

    MOST_OPEN = 16

    def __init__(self, top: int) -> None:
        self._open = [os.dup(top)]
        self._closed: list[tuple[int, int]] = []  # of the directories above the open ones

    @property
    def fd(self) -> int:
        return self._open[-1]

    def enter(self, name: str) -> None:
        """Into a directory of this one. OSError: it is none (any more)."""
        self.push(os.open(name, DIRECTORY, dir_fd=self.fd))

    def push(self, directory: int) -> None:
        """Into an open directory of this one, which is closed when it is left."""
        self._open.append(directory)
        if len(self._open) > self.MOST_OPEN:
            above = self._open.pop(0)
            self._closed.append(_identity(above))
            os.close(above)

    @property
    def above(self) -> int:
        """The directory above this one. OSError: somebody has moved this one away."""
        if len(self._open) == 1:
            above = os.open("..", DIRECTORY, dir_fd=self.fd)
            if _identity(above) != self._closed.pop():
                os.close(above)
                raise OSError(errno.ESTALE, "a directory was moved while it was walked")
            self._open.insert(0, above)
        return self._open[-2]

    def leave(self) -> None:
        """Back to the directory above."""
        _ = self.above
        os.close(self._open.pop())

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


def walk(top: int) -> Iterator[Entry]:
    """All there is in an open directory, in the order of names. What goes away meanwhile is left out.

    An OSError names what it is about, from `top` on.
    """
    position = Position(top)
    # For each directory on the way: its own entry, and the names in it that are still to come, last first.
    way: list[tuple[Entry | None, list[str]]] = [(None, _names(position.fd))]
    try:
        while way:
            own, names = way[-1]
            if names:
                name = names.pop()
                try:
                    entry, below = _look(position, name)
                except OSError as error:
                    folders = [above.name for above, _ in way if above is not None]
                    raise OSError(error.errno, error.strerror, "/".join((*folders, name))) from None
                if entry is not None:
                    yield entry
                if entry is not None and entry.own >= 0:
                    way.append((entry, below))
                continue
            way.pop()
            if own is not None:
                yield Entry(position.above, own.name, own.info, position.fd, left=True)
                position.leave()
    finally:
        position.close()


def _look(position: Position, name: str) -> tuple[Entry | None, list[str]]:
    """The entry of that name; into it where it is a directory, and the names there. None: it is gone or another by now."""
    try:
        info = os.lstat(name, dir_fd=position.fd)
        if not stat.S_ISDIR(info.st_mode):
            return Entry(position.fd, name, info), []
        position.enter(name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None, []
        raise
    return Entry(position.above, name, info, position.fd), _names(position.fd)


def size(top: str) -> int:
    """Of all files in it, in bytes."""
    fd = os.open(top, DIRECTORY)
    try:
        return sum(entry.info.st_size for entry in walk(fd) if entry.own < 0)
    finally:
        os.close(fd)


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as found:
        return sorted((item.name for item in found), reverse=True)


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
