"""The command an emulator runs, found again when the emulator was killed: it, and what it started.

The kernel tells only the command itself that its parent is gone. A shell dies of that and leaves what it ran;
others do not heed it. So the command's environment holds a mark, written down beside the sandboxes, and
whoever ends those ends what carries the mark, too. What has left the session lives on purpose and is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

_VARIABLE = "LOWTIDE_EMULATE_COMMAND"
_FILE = "command"
_GRACE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def main(parent: str, *command: str) -> int:
    """Become `command`, as a child of the emulator `parent`: SIGTERM when that is killed, since all it talks to is gone.

    A process of its own does this (see `lowtide.isolated`): the emulator has threads, and a child that is forked
    from it must not run Python before it executes the command. What does not heed the signal, and what the
    command started, is ended by the reaper (`end_marked`).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # killed before that
        return 128 + signal.SIGTERM
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # which Python ignores
    try:
        os.execvp(command[0], command)  # noqa: S606
    except FileNotFoundError:
        sys.stderr.write(f"lowtide emulate: {command[0]}: command not found\n")
        return 127
    except OSError as error:
        sys.stderr.write(f"lowtide emulate: {command[0]}: not executable: {error.strerror}\n")
        return 126


def mark(directory: Path) -> dict[str, str]:
    """What to add to the command's environment. Written down before the command starts."""
    value = secrets.token_hex(16)
    (directory / _FILE).write_text(json.dumps({"mark": value, "session": os.getsid(0)}))
    return {_VARIABLE: value}


def end_marked(directory: Path) -> None:
    """End what a dead emulator's command left: asked first, and a little later not asked any more."""
    try:
        written = json.loads((directory / _FILE).read_text())
        entry, session = f"{_VARIABLE}={written['mark']}".encode(), int(written["session"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # it ran none
    _signal_all(entry, session, signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    while _signal_all(entry, session, None) and time.monotonic() < until:
        time.sleep(0.05)
    for _ in range(20):  # what forks while it is killed is found the next time
        if not _signal_all(entry, session, signal.SIGKILL):
            return
        time.sleep(0.05)


def _signal_all(entry: bytes, session: int, number: signal.Signals | None) -> int:
    """Signal every process that carries the mark; how many there were."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            process = os.pidfd_open(int(name))  # first: what is read then is about this process
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
                if entry in environment.split(b"\0") and os.getsid(int(name)) == session:
                    if number is not None:
                        signal.pidfd_send_signal(process, number)
                    found += 1
            finally:
                os.close(process)
    return found
