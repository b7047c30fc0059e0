"""Unpacking a tar stream into an open directory, file by file: each is there as a whole or not at all.

Two sides use it. Out of a sandbox (`Careful`) the stream is hostile: no link is ever followed, links are made
last and only those that provably stay inside. The standard library's ``data`` filter is not enough there: it
trusts ``realpath``, which long chains of links have defeated before. Into a sandbox (`Replacing`, which the
spawner loads by its path) it goes on top of what is there, also of what may only be read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from . import tar_stream as tar
from .walk import Position, TooLarge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .tar_stream import Member, Reader

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HOLES_FROM = 1 << 16
_ZEROS = bytes(1 << 20)
_MOST_REMEMBERED = (
    256 << 20
)  # bytes of names: what was skipped, stripped or changed, and links still to be made
_MOST_SETTLED = 100_000  # directories that are remembered until the end; more only fill memory
_ENTRY_BYTES = 4096  # what an entry takes on a disk besides its content, and at least


class _Folder:
    """A directory that gets its mode and time at the end, or one above such a directory.

    Directories are remembered as a tree: a full path for each would take quadratic memory in a deep tree, and
    quadratic time to visit.
    """

    __slots__ = ("folders", "settled")

    def __init__(self) -> None:
        self.folders: dict[bytes, _Folder] = {}
        self.settled: tuple[int, int | None] | None = None  # mode, time


class _Unpack:
    """What both sides do: walk down, write, and give directories their modes and times at the end."""

    follow = 0

    def __init__(self, root: int) -> None:
        self.files = self.bytes = 0
        self._root = root
        self._at: list[bytes] = []
        self._position = Position(root)
        self._top = _Folder()
        self._remembered_folders = 0

    def run(self, reader: Reader) -> None:
        try:
            for member in reader:
                self.take(reader, member)
            self.links()
            self._settle_all()
        finally:
            self._position.close()

    def take(self, reader: Reader, member: Member) -> None:
        raise NotImplementedError

    def links(self) -> None:
        """What is made last."""

    def _enter(self, parts: list[bytes]) -> int:
        """The directory of that name, made where it is missing. The descriptor is good until the next call.

        From the last directory to this one by the shorter way: a deep tree is walked in linear time.
        """
        if parts == self._at:
            return self._position.fd
        common = _common(self._at, parts)
        up = len(self._at) - common
        if up > max(common, self._position.MOST_OPEN):
            self._restart()
        else:
            try:
                for _ in range(up):
                    self._position.leave()
                    self._at.pop()
            except OSError:  # a directory was moved away, or a link led to it
                self._restart()
        for depth in range(len(self._at), len(parts)):
            self._position.push(self._into(self._position.fd, parts, depth))
            self._at.append(parts[depth])
        return self._position.fd

    def _restart(self) -> None:
        self._position.close()
        self._position, self._at = Position(self._root), []

    def _into(self, fd: int, parts: list[bytes], depth: int) -> int:
        """From the directory above into `parts[depth]`."""
        name = parts[depth]
        try:
            return os.open(name, _FOLDER | self.follow, dir_fd=fd)
        except FileNotFoundError:
            self._made()
            os.mkdir(name, 0o755, dir_fd=fd)
            return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)

    def _made(self) -> None:
        """Something is about to be made."""

    def _settle(self, parts: list[bytes], mode: int, moment: int | None) -> None:
        folder = self._remembered_folder(parts, _MOST_SETTLED)
        if folder is not None:
            folder.settled = (mode, moment)
        else:
            os.fchmod(self._enter(parts), mode)

    def _remembered_folder(self, parts: list[bytes], most: int | None = None) -> _Folder | None:
        """The record of a directory. None: there is none, and `most` are remembered already."""
        folder = self._top
        for part in parts:
            below = folder.folders.get(part)
            if below is None:
                if most is not None and self._remembered_folders >= most:
                    return None
                self._remembered_folders += 1
                below = folder.folders[part] = _Folder()
            folder = below
        return folder

    def _settle_all(self) -> None:
        """From the bottom up: a directory may get a mode that lets nobody into it."""
        self._restart()
        way: list[tuple[_Folder, Iterator[tuple[bytes, _Folder]]]] = [
            (self._top, iter(self._top.folders.items()))
        ]
        while way:
            folder, rest = way[-1]
            for name, below in rest:
                try:
                    self._position.push(os.open(name, _FOLDER | self.follow, dir_fd=self._position.fd))
                except OSError:
                    continue  # somebody has moved it
                self._at.append(name)
                way.append((below, iter(below.folders.items())))
                break
            else:
                way.pop()
                if folder.settled is not None:
                    with contextlib.suppress(OSError, OverflowError):  # it belongs to another
                        os.fchmod(self._position.fd, folder.settled[0])
                        if folder.settled[1] is not None:
                            os.utime(self._position.fd, ns=(folder.settled[1], folder.settled[1]))
                if way and not self._up():
                    return

    def _up(self) -> bool:
        """Back to the directory above, by its path where it is not the one above any more (a link led here)."""
        self._at.pop()
        try:
            self._position.leave()
        except OSError:
            above = self._at
            self._restart()
            try:
                for name in above:
                    self._position.push(os.open(name, _FOLDER | self.follow, dir_fd=self._position.fd))
            except OSError:
                return False
            self._at = above
        return True

    def _write(self, fd: int, reader: Reader, member: Member, mode: int) -> None:
        """Content, mode and time; closes it."""
        try:
            if member.size >= _HOLES_FROM:
                at = 0
                for block in reader.content():
                    at += len(block)
                    if block == _ZEROS[: len(block)]:
                        os.lseek(fd, at, os.SEEK_SET)
                    else:
                        _write_all(fd, block)
                os.ftruncate(fd, at)
            else:
                for block in reader.content():
                    _write_all(fd, block)
            os.fchmod(fd, mode)
            _stamp(fd, member.mtime_ns)
        finally:
            os.close(fd)


class Careful(_Unpack):
    """Into an empty directory that is ours alone, from whoever it may be."""

    follow = os.O_NOFOLLOW

    def __init__(self, root: int, *, most: int | None = None, umask: int = 0) -> None:
        """`most`: bytes that are written, with 4 KiB for each entry, before `TooLarge` is raised.

        `umask` is taken from all modes.
        """
        super().__init__(root)
        self._most, self._umask, self._spent = most, umask, 0
        self.skipped: list[str] = []
        self.changed: list[str] = []
        self.stripped: list[str] = []
        self._links: list[tuple[bytes, bytes]] = []
        self._last: tuple[list[bytes], int] | None = None
        self._remembered = 0

    def take(self, reader: Reader, member: Member) -> None:
        if member.kind == tar.MARK:
            self._mark(member)
            return
        self._last = None
        parts = [part for part in member.name.split(b"/") if part not in (b"", b".")]
        if b".." in parts or b"\0" in member.name:
            self._skip(member.name)
            return
        try:
            self._take(reader, member, parts)
        except (NotADirectoryError, FileExistsError, FileNotFoundError, IsADirectoryError, _LinkInTheWay):
            self._skip(b"/".join(parts) or member.name)

    def links(self) -> None:
        for name, target in self._links:
            parts = name.split(b"/")
            try:
                os.symlink(target, parts[-1], dir_fd=self._enter(parts[:-1]))
            except (OSError, _LinkInTheWay):
                self._skip(name)

    def _take(self, reader: Reader, member: Member, parts: list[bytes]) -> None:
        kind = member.kind
        if kind == tar.FOLDER:
            self._enter(parts)
            if parts:
                self._settle(parts, (member.mode & 0o1777 & ~self._umask) | 0o700, member.mtime_ns)
                if member.mode & 0o6000:
                    self._remember(self.stripped, b"/".join(parts))
        elif not parts:
            raise FileExistsError
        elif kind == tar.FILE:
            self._spend(member.size + _ENTRY_BYTES)
            fd = os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=self._enter(parts[:-1]))
            self._write(fd, reader, member, (member.mode & 0o777 & ~self._umask) | 0o600)
            self.files += 1
            self.bytes += member.size
            self._last = (parts, member.size)
            if member.mode & 0o6000:
                self._remember(self.stripped, b"/".join(parts))
        elif kind == tar.HARD_LINK:
            self._spend(_ENTRY_BYTES)
            self._hard_link(parts, [part for part in member.link.split(b"/") if part not in (b"", b".")])
        elif kind == tar.LINK and _stays_inside(parts, member.link):
            self._spend(_ENTRY_BYTES)
            self._count(len(member.name) + len(member.link))
            self._links.append((b"/".join(parts), member.link))
        else:
            self._skip(b"/".join(parts))

    def _hard_link(self, parts: list[bytes], target: list[bytes]) -> None:
        if not target or b".." in target:
            raise FileNotFoundError
        there = os.dup(self._enter(target[:-1]))
        try:
            if not stat.S_ISREG(os.stat(target[-1], dir_fd=there, follow_symlinks=False).st_mode):
                raise FileNotFoundError
            here = self._enter(parts[:-1])
            os.link(target[-1], parts[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        finally:
            os.close(there)
        self.files += 1

    def _mark(self, member: Member) -> None:
        if tar.SKIPPED in member.marks:
            self._skip(member.marks[tar.SKIPPED])
        if tar.READ not in member.marks or self._last is None:
            return
        parts, size = self._last
        digits = member.marks[tar.READ]
        real = int(digits) if digits.isdigit() and len(digits) < 20 else 0
        self._remember(self.changed, b"/".join(parts))
        self._last = None
        if real < size:
            here = self._enter(parts[:-1])
            fd = os.open(parts[-1], os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            try:
                os.ftruncate(fd, real)
            finally:
                os.close(fd)
            self.bytes -= size - real

    def _into(self, fd: int, parts: list[bytes], depth: int) -> int:
        try:
            return super()._into(fd, parts, depth)
        except OSError as error:
            raise _LinkInTheWay from error

    def _made(self) -> None:
        self._spend(_ENTRY_BYTES)

    def _spend(self, size: int) -> None:
        self._spent += size
        if self._most is not None and self._spent > self._most:
            raise TooLarge

    def _skip(self, name: bytes) -> None:
        self._remember(self.skipped, name)

    def _remember(self, names: list[str], name: bytes) -> None:
        self._count(2 * len(name))  # a character of text takes two bytes when one of them is no ASCII
        names.append(os.fsdecode(name))

    def _count(self, size: int) -> None:
        self._remembered += size + 160
        if self._remembered > _MOST_REMEMBERED:
            raise tar.TarError("it names more that cannot be taken as it is than memory should hold")


class Replacing(_Unpack):
    """On top of what is there. Raises OSError; `root` is the directory, and it belongs to whoever unpacks."""

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self._temporary = f".lowtide-{os.getpid()}.part".encode()
        with os.scandir(root) as found:
            self._empty = next(found, None) is None  # then nothing can be in the way
        self._open_up(os.fstat(root).st_mode, [], root)

    def take(self, reader: Reader, member: Member) -> None:
        if member.kind == tar.MARK:
            for wanted in member.marks.get(tar.WANTED, b"").split(b"\0"):
                if len(wanted) > 1 and not self._empty:
                    self._refuse(wanted[1:], wanted[:1] == b"d")
            return
        parts = [part for part in member.name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise OSError(errno.EINVAL, "a name in it leads out of the directory")
        if member.kind == tar.FOLDER:
            self._enter(parts)
            if parts:
                self._settle(parts, member.mode, member.mtime_ns)
            return
        if not parts:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        name, folder = parts[-1], self._enter(parts[:-1])
        if member.kind == tar.FILE:
            self._file(folder, name, reader, member)
        elif member.kind in (tar.LINK, tar.HARD_LINK, tar.FIFO):
            try:
                if member.kind == tar.LINK:
                    os.symlink(member.link, self._temporary, dir_fd=folder)
                elif member.kind == tar.FIFO:
                    os.mkfifo(self._temporary, member.mode, dir_fd=folder)
                else:
                    folder = self._hard_link(parts, member.link)
                os.rename(self._temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:  # also where both are the same file already: then nothing is renamed
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._temporary, dir_fd=folder)

    def _file(self, folder: int, name: bytes, reader: Reader, member: Member) -> None:
        fd = os.open(self._temporary, _NEW_FILE, 0o600, dir_fd=folder)
        try:
            self._write(fd, reader, member, member.mode)
            os.rename(self._temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(self._temporary, dir_fd=folder)
            raise

    def _hard_link(self, parts: list[bytes], link: bytes) -> int:
        """Under the temporary name; the directory that this is in."""
        target = [part for part in link.split(b"/") if part not in (b"", b".")]
        if not target or b".." in target:
            raise OSError(errno.EINVAL, "a link in it leads out of the directory")
        there = os.dup(self._enter(target[:-1]))
        try:
            here = self._enter(parts[:-1])
            os.link(target[-1], self._temporary, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
            return here
        finally:
            os.close(there)

    def _refuse(self, name: bytes, folder: bool) -> None:
        """Raises where what is there cannot be replaced by what is to come. Nothing has been touched then."""
        try:
            there = stat.S_ISDIR(os.stat(name, dir_fd=self._root, follow_symlinks=folder).st_mode)
        except OSError as error:
            if not folder or error.errno != errno.ENOENT:
                return  # what is above it says why, or there is nothing
            try:
                os.lstat(name, dir_fd=self._root)
            except OSError:
                return
            there = False  # a link that leads nowhere
        if there is not folder:
            number = errno.ENOTDIR if folder else errno.EISDIR
            raise OSError(number, f"{os.fsdecode(name)}: {os.strerror(number)}")

    def _into(self, fd: int, parts: list[bytes], depth: int) -> int:
        try:
            below = super()._into(fd, parts, depth)
        except PermissionError:
            self._open_up(os.stat(parts[depth], dir_fd=fd).st_mode, parts[: depth + 1], fd)
            below = super()._into(fd, parts, depth)
        mode = os.fstat(below).st_mode
        if mode & 0o700 != 0o700:
            self._open_up(mode, parts[: depth + 1], fd)
        return below

    def _open_up(self, mode: int, path: list[bytes], above: int) -> None:
        """What may only be read is written all the same, and gets its mode back at the end."""
        if mode & 0o700 != 0o700:
            try:
                os.chmod(path[-1] if path else b".", mode & 0o7777 | 0o700, dir_fd=above)
            except OSError:
                return  # another's: what is written there says so
            folder = self._remembered_folder(path)
            if folder is not None and folder.settled is None:
                folder.settled = (mode & 0o7777, None)


class _LinkInTheWay(Exception):
    """Something that is no directory stands where one was meant."""


def _stays_inside(parts: list[bytes], target: bytes) -> bool:
    """Steps up only at the start, and no more of them than the link lies deep.

    A step up after a name could climb out through another link, so it is not allowed at all. What is
    left leads to real directories of the tree, or to links of which the same holds.
    """
    if not target or target.startswith(b"/") or b"\0" in target:
        return False
    steps = [step for step in target.split(b"/") if step not in (b"", b".")]
    up = next((n for n, step in enumerate(steps) if step != b".."), len(steps))
    return up < len(parts) and b".." not in steps[up:]


def _common(one: list[bytes], other: list[bytes]) -> int:
    """How many parts both begin with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # down or up: what nearly every step is
        return shorter
    return next(n for n in range(shorter) if one[n] != other[n])


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def _stamp(fd: int, moment: int) -> None:
    try:
        os.utime(fd, ns=(moment, moment))
    except OverflowError:
        return  # a time no calendar has
