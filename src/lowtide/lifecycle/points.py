"""Crash points: named instants of the protocol at which a test can have the process killed.

Nothing happens unless ``LOWTIDE_CRASH_AT`` names a point when the process starts. The crash tests set
it in processes of their own; the table in docs/reliability.md has one row per name.
"""

from __future__ import annotations

import os
import signal

_armed = os.environ.get("LOWTIDE_CRASH_AT", "")


def point(name: str) -> None:
    """Die here, as by kill -9, if this point is armed (``NAME`` or ``NAME:N`` for the N-th time)."""
    global _armed
    if not _armed:
        return
    armed, _, count = _armed.partition(":")
    if armed != name:
        return
    left = int(count or 1) - 1
    if left > 0:
        _armed = f"{armed}:{left}"
        return
    os.kill(os.getpid(), signal.SIGKILL)
