"""Directories that lead to what sandboxes use: their range of ids may pass them, whatever the program's umask is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MODE = 0o711
_CLOSED = 0o710


def make_passable(path: Path) -> None:
    """Make it where it is missing. As root a sandbox has ids of its own: to them, root's directories are another's."""
    path.mkdir(mode=MODE, parents=True, exist_ok=True)
    found = os.stat(path)
    if found.st_mode & MODE != MODE and not _passable_for_sandboxes(found):
        path.chmod(MODE)


def close_to_others(path: Path, owner: int | None) -> None:
    """Passable for the sandboxes' own ids (None: they are this user) and for nobody else on this machine.

    Snapshots and layers below it hold what hostile code has written, set-user-ID programs too; the state directory
    above may be one that was there already, and open.
    """
    if owner is None:
        path.chmod(0o700)
    elif not _passable_for_sandboxes(os.stat(path)):
        os.chown(path, -1, owner)
        path.chmod(_CLOSED)


def _passable_for_sandboxes(found: os.stat_result) -> bool:
    """Whether it was closed so: to an ordinary user's sandboxes what the user may pass, as root by their group."""
    if os.geteuid() != 0:
        return found.st_mode & 0o700 == 0o700
    return stat.S_IMODE(found.st_mode) == _CLOSED and found.st_gid not in (0, os.getegid())
