"""Packing a tree that may be changing: no link is followed, no size is made up. The spawner loads this file too."""

from __future__ import annotations

import errno
import os
import stat

from . import tar_stream as tar
from .walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .walk import Entry

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SMALL = 1 << 20  # read whole before anything is said about it
_UNTOLD = 1 << 18  # of a file that does not say its size, as those of /proc: a longer one is skipped
_BATCH = 1 << 18
_WANTED = 1 << 14
_MOST_LINKED = 64 << 20  # bytes of first names of files that have more names to come
_LINKED_BYTES = 350  # what remembering one takes besides the name


class Pack:
    """Packs one open directory. `write` gets blocks; what was packed is counted here.

    With `marks`, what changed and what was left out is said in the stream itself, and is not kept here. Without, a
    file that became shorter is packed again: who unpacks it needs to know nothing. With `ahead`, what is to come is
    said first.

    A file with several names is packed once, and its other names as hard links. For that at most 64 MiB of names are
    remembered; beyond that, each name is packed as a file of its own.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        *,
        marks: bool,
        one_device: bool = False,
        ahead: bool = False,
    ) -> None:
        self.files = self.bytes = 0
        self.skipped: list[str] = []
        self.changed: list[str] = []
        self._write, self._marks, self._one_device, self._ahead = write, marks, one_device, ahead
        self._batch: list[bytes] = []
        self._batched = 0
        # By its time too: the number of a file that is gone is soon another's.
        self._linked: dict[
            tuple[int, int, int], tuple[bytes, int]
        ] = {}  # the first name, and how many follow
        self._linked_bytes = 0

    def run(self, top: int) -> None:
        if self._ahead:
            self._announce(top)
        folders: list[str] = []
        device, elsewhere = os.fstat(top).st_dev, 0
        for entry in walk(top):
            if entry.left:
                folders.pop()
                elsewhere -= 1 if elsewhere else 0
                continue
            name = "/".join((*folders, entry.name))
            if entry.own >= 0:
                folders.append(entry.name)
            if elsewhere or (self._one_device and entry.own >= 0 and entry.info.st_dev != device):
                if not elsewhere:
                    self._skip(name)  # a mount: this machine's Python, /proc
                elsewhere += 1 if entry.own >= 0 else 0
                continue
            self._add(entry, name)
        self._put(tar.END)
        self._flush()

    def _announce(self, top: int) -> None:
        folders: list[str] = []
        wanted: list[bytes] = []
        size = 0
        for entry in walk(top):
            if entry.left:
                folders.pop()
                continue
            wanted.append(
                (b"d" if entry.own >= 0 else b"f") + os.fsencode("/".join((*folders, entry.name))) + b"\0"
            )
            size += len(wanted[-1])
            if entry.own >= 0:
                folders.append(entry.name)
            if size > _WANTED:
                self._put(tar.mark(tar.WANTED, b"".join(wanted)))
                wanted, size = [], 0
        if wanted:
            self._put(tar.mark(tar.WANTED, b"".join(wanted)))

    def _add(self, entry: Entry, shown: str) -> None:
        info, name = entry.info, os.fsencode(shown)
        if len(name) > tar.LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, f"a path in it is longer than {tar.LONGEST_NAME} bytes")
        mode, moment = info.st_mode & 0o7777, info.st_mtime_ns
        if entry.own >= 0:
            self._put(tar.header(name + b"/", tar.FOLDER, mode, 0, moment))
            return
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFREG:
            first = self._first_name(info) if info.st_nlink > 1 else None
            if first is not None:
                self.files += 1
                self._put(tar.header(name, tar.HARD_LINK, mode, 0, moment, first))
            elif self._add_file(entry, name, shown) and info.st_nlink > 1:
                self._remember(info, name)
        elif kind == stat.S_IFLNK:
            try:
                target = os.fsencode(os.readlink(entry.name, dir_fd=entry.parent))
            except FileNotFoundError:
                return
            except PermissionError:  # one of /proc that does not say where it leads
                self._skip(shown)
                return
            self._put(tar.header(name, tar.LINK, mode, 0, moment, target))
        else:
            self._skip(shown)

    def _remember(self, info: os.stat_result, name: bytes) -> None:
        size = len(name) + _LINKED_BYTES
        if self._linked_bytes + size <= _MOST_LINKED:
            self._linked[info.st_dev, info.st_ino, info.st_mtime_ns] = name, info.st_nlink - 1
            self._linked_bytes += size

    def _first_name(self, info: os.stat_result) -> bytes | None:
        """Of a file that was packed under another name; forgotten when this is the last of its names."""
        known = (info.st_dev, info.st_ino, info.st_mtime_ns)
        found = self._linked.get(known)
        if found is None:
            return None
        name, left = found
        if left > 1:
            self._linked[known] = name, left - 1
        else:
            del self._linked[known]
            self._linked_bytes -= len(name) + _LINKED_BYTES
        return name

    def _add_file(self, entry: Entry, name: bytes, shown: str) -> bool:
        try:
            fd = os.open(entry.name, _OPEN, dir_fd=entry.parent)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESRCH):
                return False
            # Another thing by now, or none.
            if error.errno in (errno.ELOOP, errno.ENXIO) or _holds_nothing(entry.info):
                self._skip(shown)
                return False
            raise OSError(error.errno, error.strerror, shown) from None
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                self._skip(shown)
                return False
            if not before.st_size and not self._says_its_size(fd):
                return self._add_untold(fd, name, shown, before)
            try:
                real, whole = self._content(fd, name, shown, before)
            except OSError as error:
                if error.filename != shown or before.st_size > _SMALL or not _holds_nothing(before):
                    raise
                self._skip(shown)  # nothing was said about it yet
                return False
            after = os.fstat(fd)
            for _ in range(0 if self._marks else 3):  # shorter than was said: once more, as it is now
                if whole:
                    break
                os.lseek(fd, 0, os.SEEK_SET)
                real, whole = self._content(fd, name, shown, after)
                after = os.fstat(fd)
            if not (whole or self._marks):
                raise OSError(errno.EAGAIN, "it became shorter each time it was read", shown)
            if not whole or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                if self._marks:
                    self._put(tar.mark(tar.READ, b"%d" % real))
                else:
                    self.changed.append(shown)
            self.files += 1
            self.bytes += real
            return True
        finally:
            os.close(fd)

    def _says_its_size(self, fd: int) -> bool:
        """Of a file that says it is empty. One that has begun to grow does; what is like /proc never does."""
        try:
            return not os.pread(fd, 1, 0) or os.fstat(fd).st_size > 0
        except OSError:
            return False

    def _add_untold(self, fd: int, name: bytes, shown: str, info: os.stat_result) -> bool:
        try:
            data = _read(fd, _UNTOLD, shown)
        except OSError:
            data = bytes(_UNTOLD)
        if len(data) == _UNTOLD:
            self._skip(shown)
            return False
        head = tar.header(name, tar.FILE, info.st_mode & 0o7777, len(data), info.st_mtime_ns)
        self._put(head + data + tar.padding(len(data)))
        self.files += 1
        self.bytes += len(data)
        return True

    def _content(self, fd: int, name: bytes, shown: str, info: os.stat_result) -> tuple[int, bool]:
        """Head and content of a file, as long as it was when it was looked at; how much is real, and whether all is."""
        size, mode, moment = info.st_size, info.st_mode & 0o7777, info.st_mtime_ns
        if size <= _SMALL:
            data = _read(fd, size, shown)
            self._put(tar.header(name, tar.FILE, mode, len(data), moment) + data + tar.padding(len(data)))
            return len(data), True
        self._put(tar.header(name, tar.FILE, mode, size, moment))
        left = size
        while left and (data := _read(fd, min(left, _SMALL), shown)):
            self._put(data)
            left -= len(data)
        real = size - left
        while left:
            count = min(left, _SMALL)
            self._put(bytes(count))
            left -= count
        self._put(tar.padding(size))
        return real, real == size

    def _skip(self, shown: str) -> None:
        if self._marks:
            self._put(tar.mark(tar.SKIPPED, os.fsencode(shown)))
        else:
            self.skipped.append(shown)

    def _put(self, data: bytes) -> None:
        self._batch.append(data)
        self._batched += len(data)
        if self._batched >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._batch:
            block, self._batch, self._batched = b"".join(self._batch), [], 0
            self._write(block)


def _holds_nothing(info: os.stat_result) -> bool:
    """It says so, or has a size and no block to hold it, as those of /sys."""
    return not info.st_size or not info.st_blocks


def _read(fd: int, size: int, shown: str) -> bytes:
    try:
        data = os.read(fd, size) if size else b""
        while 0 < len(data) < size and (more := os.read(fd, size - len(data))):
            data += more
    except OSError as error:
        raise OSError(error.errno, error.strerror, shown) from None
    return data
