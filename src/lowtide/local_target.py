"""Where a download goes on this machine: in the place of a file, or into what is none, as `cp` does it.

Renaming over a device, a pipe or a link would replace it: as root, ``/dev/null`` for everybody.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable

from lowtide import threads
from lowtide.trees.holes import copy_data

_OWN = r"/proc/(?:self|thread-self|%d)/fd/(\d+)"
_MOST_LINKS = 40


def resolve(path: str) -> tuple[str, bool]:
    """The file that is to be replaced, links followed; or, with True, what is to be opened and written into."""
    for _ in range(_MOST_LINKS):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return path, False
        if stat.S_ISREG(mode):
            return path, False
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        folder = os.path.realpath(os.path.dirname(path))
        if not stat.S_ISLNK(mode) or f"{folder}/".startswith("/proc/"):
            return os.path.join(folder, os.path.basename(path)), True
        path = os.path.join(folder, os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def write_into(path: str, blocks: Iterable[bytes], given_up: Callable[[], bool]) -> None:
    """Into a device, a pipe, an open descriptor. In a thread: it waits for whoever reads there."""
    fd = _open(path, given_up)
    try:
        for block in blocks:
            view = memoryview(block)
            while view and not given_up():
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    threads.select_ready([], [fd], [], 0.2)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def umask() -> int:
    """Of this process. It is read without changing it, which would be seen by every other thread."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def put_in_place(source: str, target: str) -> None:
    """A file that has come, onto `target`, whatever that is."""
    place, direct = resolve(target)
    if direct:
        with open(source, "rb") as file:
            write_into(place, iter(lambda: file.read(1 << 20), b""), lambda: False)
        os.unlink(source)
        return
    try:
        os.replace(source, place)
    except OSError as error:
        if error.errno != errno.EXDEV:  # the link led to another disk
            raise
        _replace_from_afar(source, place)


def _replace_from_afar(source: str, place: str) -> None:
    fd, part = tempfile.mkstemp(prefix=".lowtide-", dir=os.path.dirname(place))
    try:
        with open(fd, "wb") as into, open(source, "rb") as file:
            copy_data(file.fileno(), into.fileno())
            info = os.fstat(file.fileno())
            os.fchmod(into.fileno(), stat.S_IMODE(info.st_mode))
            os.utime(into.fileno(), ns=(info.st_atime_ns, info.st_mtime_ns))
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
    os.unlink(source)


def _open(path: str, given_up: Callable[[], bool]) -> int:
    own = re.fullmatch(_OWN % os.getpid(), path)
    if own:  # and not opened again: that would begin at its start, and forget that it appends
        return os.dup(int(own[1]))
    if stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.ENXIO, "is a socket: nothing can be copied into it", path)
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO or given_up():  # a pipe that nobody reads yet
                raise
        time.sleep(0.02)
