"""The file methods of a sandbox. Paths are absolute, or relative to its working directory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from lowtide import validate
from lowtide.operation import Operation

if TYPE_CHECKING:
    from lowtide.held_sandbox import HeldSandbox
    from lowtide.providers.base import Provider
    from lowtide.providers.optional import FileEntry
    from lowtide.stream import StreamReader
    from lowtide.transfer import Transfer

StrPath: TypeAlias = str | os.PathLike[str]

T = TypeVar("T")


class SandboxFiles:
    """What a `Sandbox` does with files: each method starts an operation on the sandbox."""

    _life: HeldSandbox

    def read_file(
        self, path: StrPath, *, max_bytes: int | None = 1 << 30, timeout_seconds: float | None = None
    ) -> Operation[bytes]:
        """The whole file. SandboxFileNotFoundError and its family; SandboxFileError beyond `max_bytes` (None: no bound)."""
        from lowtide import files

        most = None if max_bytes is None else validate.positive("max_bytes", max_bytes)
        return self._file_call(path, lambda p, i, where: files.read(p, i, where, most), timeout_seconds)

    def write_file(
        self,
        path: StrPath,
        data: bytes | str,
        *,
        mode: int | None = None,
        timeout_seconds: float | None = None,
    ) -> Operation[None]:
        """Replace the file, making parent directories. Who reads it meanwhile sees the old one or the new one."""
        from lowtide import files

        validate.mode("mode", mode)
        content = validate.content("data", data)
        return self._file_call(
            path, lambda p, i, where: files.write(p, i, where, content, mode), timeout_seconds
        )

    def read_file_streaming(self, path: StrPath) -> StreamReader[bytes]:
        """The file in chunks, whatever its size. Closing the reader ends the transfer."""
        from lowtide import files

        return files.reader(self._life, validate.path("path", path))

    def write_file_streaming(
        self,
        path: StrPath,
        data: bytes | Iterable[bytes] | AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> Operation[int]:
        """Write chunks as they come; returns the number of bytes. An iterable is read in a thread of its own.

        With `size`, more or less than that is a SandboxFileError and nothing is replaced.
        """
        from lowtide import files, source

        validate.mode("mode", mode)
        if size is not None:
            validate.whole("size", size, 0)
        chunks = source.chunks_of(data)
        return self._file_call(path, lambda p, i, where: files.write_chunks(p, i, where, chunks, size, mode))

    def upload(self, local: str | os.PathLike[str], remote: StrPath) -> Operation[Transfer]:
        """Copy a file, or a whole directory, into the sandbox; the size is verified.

        A directory's content becomes the content of `remote`; what is there and in the way is replaced, file by
        file, each as a whole. Modes and times are kept. A device, a pipe or a socket is refused.
        """
        from lowtide import upload

        source = upload.local_source(validate.path("local", local))
        return self._file_call(
            remote, lambda p, i, where: upload.upload(p, i, source, where), argument="remote"
        )

    def download(
        self, remote: StrPath, local: str | os.PathLike[str], *, max_bytes: int | None = 64 << 30
    ) -> Operation[Transfer]:
        """Copy a file, or a whole directory, out of the sandbox; the size is verified.

        What a directory holds is not trusted: links that lead out of it, devices and the like are
        left out, and named in ``Transfer.skipped``. A file takes its place when it is whole; a device or a pipe
        in its place is written into. Modes are kept without the bits of this process's umask.

        SandboxFileError where more than `max_bytes` (None: no bound) would be written, each entry of a directory counting
        for 4 KiB besides its content, and where a file brings 64 MiB more than the size that it reports. Nothing is left
        of such a download.
        """
        from lowtide import download

        target = os.path.abspath(validate.path("local", local))
        most = None if max_bytes is None else validate.positive("max_bytes", max_bytes)
        return self._file_call(
            remote,
            lambda p, i, where: download.download(p, i, where, target, max_bytes=most),
            argument="remote",
        )

    def list_dir(self, path: StrPath = ".") -> Operation[Sequence[FileEntry]]:
        """What a directory holds, sorted by name; links are not followed."""
        from lowtide import files

        return self._file_call(path, files.list_dir)

    def make_dir(self, path: StrPath) -> Operation[None]:
        """With parents; silent when it is already a directory."""
        from lowtide import files

        return self._file_call(path, files.make_dir)

    def remove(self, path: StrPath, *, recursive: bool = False) -> Operation[None]:
        """A file, a link or an empty directory; with `recursive`, whatever it is and holds."""
        from lowtide import files

        validate.flag("recursive", recursive)
        return self._file_call(path, lambda p, i, where: files.remove(p, i, where, recursive))

    def exists(self, path: StrPath) -> Operation[bool]:
        """Whether there is anything at that path; a link counts, wherever it points."""
        from lowtide import files

        return self._file_call(path, files.exists)

    def stat(self, path: StrPath) -> Operation[FileEntry]:
        """A link is described itself, not what it points to."""
        from lowtide import files

        return self._file_call(path, files.stat)

    def _call(
        self, work: Callable[[Provider, str], Awaitable[T]], timeout_seconds: float | None = None
    ) -> Operation[T]:
        timeout_seconds = validate.seconds_or_none("timeout_seconds", timeout_seconds)
        self._life.connect()
        return Operation.start(self._life.use(work, timeout_seconds))

    def _file_call(
        self,
        path: StrPath,
        work: Callable[[Provider, str, str], Awaitable[T]],
        timeout_seconds: float | None = None,
        *,
        argument: str = "path",
    ) -> Operation[T]:
        from lowtide import files

        where = validate.path(argument, path)

        async def there(provider: Provider, sandbox_id: str) -> T:
            return await work(
                provider, sandbox_id, await files.absolute(self._life, provider, sandbox_id, where)
            )

        return self._call(there, timeout_seconds)
