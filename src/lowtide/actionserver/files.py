"""Files of the sandbox as the server serves them: text, listings, uploads, and directories as a zip."""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    import zipfile
    from typing import IO

MAX_TEXT_BYTES = 64 << 20
MAX_UPLOAD_BYTES = 16 << 30


class BadPath(ValueError):
    """A path that is not taken. Status 400."""


class TooLarge(ValueError):
    """More than is taken. Status 413."""


class BinaryFile(ValueError):
    """Not text."""


class SpecialFile(OSError):
    """A pipe, socket or device: to open it may wait for ever, to read it may never end."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "neither a plain file nor a directory", path)


def absolute(path: str) -> str:
    """As a request must name it: absolute, without NUL."""
    if not path or "\0" in path or not path.startswith("/"):
        raise BadPath(f"the path must be absolute, not {path!r}")
    return os.path.normpath(path)


def resolve(path: str, cwd: str) -> str:
    """As an action may name it: relative to the shell's directory."""
    if not path or "\0" in path:
        raise BadPath(f"{path!r} is no path")
    return os.path.normpath(os.path.join(cwd, os.path.expanduser(path) if path.startswith("~") else path))


def read_text(path: str) -> str:
    """Raises OSError, BinaryFile. What is no UTF-8 comes back unchanged through `write_text`."""
    data = read_bytes(path)
    if b"\0" in data[:8192]:
        raise BinaryFile(f"{path} is a binary file; download it")
    return data.decode("utf-8", "surrogateescape")


def read_bytes(path: str) -> bytes:
    """All of it or nothing. Raises OSError, BinaryFile."""
    with open_plain(path) as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise BinaryFile(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MiB; download it")
    return data


def open_plain(path: str) -> IO[bytes]:
    """Raises SpecialFile: what is looked at is what was opened, without waiting for another end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "a directory", path)
        if not stat.S_ISREG(mode):
            raise SpecialFile(path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_text(path: str, text: str) -> None:
    """Whole or not at all: a temporary file beside it takes its place, with its mode."""
    data = text.encode("utf-8", "surrogateescape")
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    target = os.path.realpath(path)
    mode = 0o664
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        pass
    else:
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, "a directory stands there", path)
        if not stat.S_ISREG(found):
            raise SpecialFile(path)
        mode = stat.S_IMODE(found)
    # A name of its own: one made from the file's would be too long for some that are not.
    temporary = os.path.join(os.path.dirname(target), f".{os.urandom(6).hex()}.write")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def names(path: str) -> list[str]:
    """Directories first, each with a slash, then the rest; without regard to case. Raises OSError."""
    with os.scandir(path) as entries:
        found = [(not entry.is_dir(), entry.name) for entry in entries]
    found.sort(key=lambda item: (item[0], item[1].lower(), item[1]))
    return [name if is_file else f"{name}/" for is_file, name in found]


def write_zip(path: str, out: IO[bytes]) -> None:
    """The files under `path`, or the one file it is, into an archive that is written as it grows."""
    import zipfile

    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        if not os.path.isdir(path):
            _add(archive, path, os.path.basename(path))
            return
        for folder, folders, files in os.walk(path):
            inside = os.path.relpath(folder, path)
            if not files and not folders and inside != ".":
                archive.writestr(f"{_name(inside)}/", b"")
            for name in sorted(files):
                full = os.path.join(folder, name)
                try:
                    if stat.S_ISREG(os.lstat(full).st_mode):  # no links out of the tree, no pipes
                        _add(archive, full, os.path.normpath(os.path.join(inside, name)))
                except (FileNotFoundError, SpecialFile):
                    pass  # it went while the others were read


def _add(archive: zipfile.ZipFile, path: str, name: str) -> None:
    import shutil
    import zipfile

    with open_plain(path) as file:
        info = zipfile.ZipInfo.from_file(path, _name(name), strict_timestamps=False)
        info.compress_type = zipfile.ZIP_DEFLATED
        with archive.open(info, "w", force_zip64=info.file_size > 1 << 30) as out:
            shutil.copyfileobj(file, out, 1 << 18)


def _name(name: str) -> str:
    """As a zip can hold it: what is no UTF-8 is shown as such."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def extract_zip(archive_path: str, destination: str) -> None:
    """Raises BadPath for an archive that would write outside of `destination`; then nothing is written.

    TooLarge for one that unpacks to more than an upload may have, whatever it says about itself.
    """
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(archive_path) as archive:
            _extract(archive, destination)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # Of those the last two are zipfile's words for a method it does not know and for a password.
        raise BadPath(f"not a zip archive that can be read here: {error}") from None


def _extract(archive: zipfile.ZipFile, destination: str) -> None:
    root, left = os.path.realpath(destination), MAX_UPLOAD_BYTES
    for entry in archive.infolist():
        parts = entry.filename.split("/")
        if entry.filename.startswith("/") or ".." in parts or "\0" in entry.filename:
            raise BadPath(f"the archive names a path outside of its directory: {entry.filename!r}")
        folder = os.path.dirname(os.path.join(root, entry.filename))
        if os.path.commonpath((root, os.path.realpath(folder))) != root:  # through a link that stands there
            raise BadPath(f"{entry.filename!r} would be written outside of {destination}")
    for entry in archive.infolist():
        target = os.path.join(root, entry.filename)
        if entry.is_dir():
            os.makedirs(target, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(target) or (os.path.exists(target) and not os.path.isfile(target)):
            os.unlink(target)
        with archive.open(entry) as source, open(target, "wb") as file:
            while piece := source.read(1 << 20):
                left -= len(piece)
                if left < 0:
                    raise TooLarge(f"the archive unpacks to more than {MAX_UPLOAD_BYTES >> 30} GiB")
                file.write(piece)
        mode = (entry.external_attr >> 16) & 0o777
        if mode:
            os.chmod(target, mode)


def media_type(path: str) -> str | None:
    """Of what an agent looks at and does not read."""
    return _MEDIA.get(os.path.splitext(path)[1].lower())


_MEDIA = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".bmp": "image/bmp",
    ".pdf": "application/pdf",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}
