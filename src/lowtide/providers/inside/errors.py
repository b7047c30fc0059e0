"""What an error number of the program inside means, for every provider."""

from __future__ import annotations

import errno
from typing import Any

from lowtide.errors import (
    LowtideError,
    ResourceExhaustedError,
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
    SandboxPermissionError,
)

_KINDS: dict[int, type[SandboxFileError]] = {
    errno.ENOENT: SandboxFileNotFoundError,
    errno.EEXIST: SandboxFileExistsError,
    errno.EISDIR: SandboxIsADirectoryError,
    errno.ENOTDIR: SandboxNotADirectoryError,
    errno.EACCES: SandboxPermissionError,
    errno.EPERM: SandboxPermissionError,
    errno.EROFS: SandboxPermissionError,
}
_WORDS = {
    errno.ENOENT: "no such file or directory",
    errno.EEXIST: "already exists",
    errno.EISDIR: "is a directory",
    errno.ENOTDIR: "is not a directory",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EROFS: "read-only file system",
    errno.ENOTEMPTY: "directory is not empty",
    errno.EINVAL: "is not a regular file",
    errno.ELOOP: "too many links",
    errno.ENAMETOOLONG: "name is too long",
    errno.EPIPE: "the transfer was cut short",
    errno.EPROTO: "the transfer was cut short",
}


def file_error(number: int, path: str, **context: Any) -> LowtideError:
    words = _WORDS.get(number, errno.errorcode.get(number, f"error {number}"))
    if number in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return ResourceExhaustedError(f"{path}: the sandbox has no space left", **context)
    return _KINDS.get(number, SandboxFileError)(f"{path}: {words}", path=path, number=number, **context)
