"""Crash points: named instants of the protocol at which a test can have the process killed.

Nothing happens unless ``LOWTIDE_CRASH_AT`` names a point when the process starts. The crash tests set
it in processes of their own; the table in docs/reliability.md has one row per name.
"""

from __future__ import annotations

import os
import signal

_armed = os.environ.get("LOWTIDE_CRASH_AT", "")


def point(name: str) -> None:
    """Die here, as by kill -9, if this point is armed.

    ``NAME`` arms it, ``NAME:N`` its N-th passing, ``NAME@FILE`` for one process only: whoever makes FILE.
    """
    global _armed
    if not _armed:
        return
    armed, _, once = _armed.partition("@")
    armed, _, count = armed.rpartition(":") if armed.rpartition(":")[2].isdigit() else (armed, "", "")
    if armed != name:
        return
    left = int(count or 1) - 1
    if left > 0:
        _armed = f"{armed}:{left}" + (f"@{once}" if once else "")
        return
    if once:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            _armed = ""
            return
    os.kill(os.getpid(), signal.SIGKILL)
