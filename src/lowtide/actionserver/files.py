"""Files of the sandbox as the server serves them: text, listings, uploads, and directories as a zip."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO

MAX_TEXT_BYTES = 64 << 20


class BadPath(ValueError):
    """A path that is not taken. Status 400."""


class BinaryFile(ValueError):
    """Not text."""


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
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise BinaryFile(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MiB; download it")
        data = file.read(MAX_TEXT_BYTES + 1)
    if b"\0" in data[:8192]:
        raise BinaryFile(f"{path} is a binary file; download it")
    return data.decode("utf-8", "surrogateescape")


def write_text(path: str, text: str) -> None:
    """Whole or not at all: a temporary file beside it takes its place, with its mode."""
    data = text.encode("utf-8", "surrogateescape")
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    target = os.path.realpath(path)
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode)
    except OSError:
        mode = 0o664
    if os.path.isdir(target):
        raise IsADirectoryError(21, "a directory stands there", path)
    temporary = f"{target}.{os.urandom(6).hex()}"
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
            archive.write(path, os.path.basename(path))
            return
        for folder, folders, files in os.walk(path):
            inside = os.path.relpath(folder, path)
            if not files and not folders and inside != ".":
                archive.writestr(f"{inside}/", b"")
            for name in sorted(files):
                full = os.path.join(folder, name)
                if stat.S_ISREG(os.lstat(full).st_mode):  # no links out of the tree, no pipes
                    archive.write(full, os.path.normpath(os.path.join(inside, name)))


def extract_zip(archive_path: str, destination: str) -> None:
    """Raises BadPath for an archive that would write outside of `destination`; then nothing is written."""
    import shutil
    import zipfile

    try:
        archive = zipfile.ZipFile(archive_path)
    except zipfile.BadZipFile as error:
        raise BadPath(f"not a zip archive: {error}") from None
    with archive:
        for entry in archive.infolist():
            parts = entry.filename.split("/")
            if entry.filename.startswith("/") or ".." in parts or "\0" in entry.filename:
                raise BadPath(f"the archive names a path outside of its directory: {entry.filename!r}")
        for entry in archive.infolist():
            target = os.path.join(destination, entry.filename)
            if entry.is_dir():
                os.makedirs(target, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.islink(target):
                os.unlink(target)
            with archive.open(entry) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            mode = (entry.external_attr >> 16) & 0o777
            if mode:
                os.chmod(target, mode)
