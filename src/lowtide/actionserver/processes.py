"""Ending processes: all that belong to a session, also those that left its process groups."""

from __future__ import annotations

import os
import signal
import time

_PAUSE = 0.02


def members(session: int) -> list[int]:
    """The living processes of that session."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != b"Z":
            found.append(int(name))
    return found


def runs_since(pid: int, seconds: float) -> bool:
    """Whether that process lives, and has for so long."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] != b"Z" and age >= seconds


def end_session(session: int, grace_seconds: float) -> None:
    """HUP and TERM, grace, KILL. Returns when none is left, or a second after KILL."""
    for signals, seconds in (
        ((signal.SIGHUP, signal.SIGTERM, signal.SIGCONT), grace_seconds),
        ((signal.SIGKILL,), 1.0),
    ):
        deadline = time.monotonic() + seconds
        for pid in members(session):
            for number in signals:
                try:
                    os.kill(pid, number)
                except OSError:
                    break
        while members(session):
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
        else:
            return
