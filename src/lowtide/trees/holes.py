"""Files with holes: what was never written is not written again, whatever size the file claims."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import IO

from lowtide.trees.walk import TooLarge

_COPY_BYTES = 1 << 24  # so that a copy that is given up ends soon
_NO_SUCH_CALL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_ZEROS = bytes(1 << 20)


def copy_data(
    source: int, target: int, given_up: Callable[[], bool] = lambda: False, most: int | None = None
) -> int:
    """An open file into an empty one, by the kernel: at most the bytes it has now, holes included.

    Returns the bytes copied. TooLarge: it holds more than `most` bytes, holes not counted, because they take no space.
    """
    size = os.fstat(source).st_size
    if size == 0:  # /proc and its like say so although there is something
        return _copy_stream(source, target, given_up, most)
    at = written = 0
    while at < size and not given_up():
        try:
            start = min(os.lseek(source, at, os.SEEK_DATA), size)
            end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left, or it has become shorter
                at = max(at, min(size, os.fstat(source).st_size))
                break
            raise
        at = start
        while at < end and not given_up():
            if most is not None and written >= most:
                raise TooLarge
            left = end - at if most is None else min(end - at, most - written)
            count = _some(source, target, at, min(left, _COPY_BYTES))
            if not count:
                break
            at += count
            written += count
        if at < end:
            break  # it has become shorter meanwhile
    os.ftruncate(target, at)
    return at


def write_or_skip(file: IO[bytes], data: bytes) -> None:
    """Write a block, or leave a hole where it is nothing but zeros. `finish` comes last."""
    if data == _ZEROS[: len(data)]:
        file.seek(len(data), os.SEEK_CUR)
    else:
        file.write(data)


def finish(file: IO[bytes]) -> None:
    """Make it as long as what was written or skipped."""
    file.truncate(file.tell())


def _some(source: int, target: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count, at, at)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
    os.lseek(target, at, os.SEEK_SET)
    return os.sendfile(target, source, at, count)


def _copy_stream(source: int, target: int, given_up: Callable[[], bool], most: int | None) -> int:
    copied = 0
    while not given_up() and (data := os.read(source, 1 << 20)):  # these cannot be copied by the kernel
        if not copied and os.fstat(source).st_size:
            break  # it was empty and has begun to grow: /proc never says a size
        if most is not None and copied + len(data) > most:
            raise TooLarge
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
        copied += len(data)
    return copied
