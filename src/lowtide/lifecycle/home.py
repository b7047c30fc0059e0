"""Where lowtide keeps its state on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
            f"cannot make the state directory {path}: {error.strerror}; set LOWTIDE_HOME to a directory you can write"
        ) from error
    return path
