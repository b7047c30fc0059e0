"""This machine: which one it is, since which boot, and where lowtide keeps its state on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lowtide.errors import LedgerError


def home(environ: Mapping[str, str] | None = None) -> Path:
    """``LOWTIDE_HOME``, else the XDG state directory. Made on first use, readable by its owner alone."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("LOWTIDE_HOME")
    if chosen:
        path = Path(chosen).absolute()
    else:
        state = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
        path = Path(state) / "lowtide"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"cannot make the state directory {path}: {error.strerror}; "
            "set LOWTIDE_HOME to a directory you can write"
        ) from error
    return path


@cache
def this_host() -> str:
    """The machine's own id beside its name, so that two machines named alike are two."""
    try:
        with open("/etc/machine-id") as file:
            machine = file.read().strip()[:12]
    except OSError:
        machine = ""
    return f"{socket.gethostname()}.{machine}" if machine else socket.gethostname()


@cache
def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def process_start_time(pid: int) -> int | None:
    """Start time in clock ticks, or None when the process is gone or only its exit status is left."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
