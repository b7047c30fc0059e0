"""Directories that lead to what sandboxes use: their range of ids may pass them, whatever the program's umask is."""

from __future__ import annotations

import os
from pathlib import Path

MODE = 0o711


def make_passable(path: Path) -> None:
    """Make it where it is missing. As root a sandbox has ids of its own: to them, root's directories are another's."""
    path.mkdir(mode=MODE, parents=True, exist_ok=True)
    if os.stat(path).st_mode & MODE != MODE:
        path.chmod(MODE)
