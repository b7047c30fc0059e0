"""Opening a file inside a sandbox so that nothing but a regular file is ever held."""

from __future__ import annotations

import errno
import os
import stat

SAFE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | SAFE)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "not a regular file", path)
    return fd
