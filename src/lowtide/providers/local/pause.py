"""Pausing a sandbox: every process in it stopped, and continued again.

By signals: a timer that sends SIGCONT wakes its process while the sandbox is paused. docs/security.md says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from lowtide.errors import SandboxUnavailableError
from lowtide.providers.local.destroy import members, send, state
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory

_PATIENCE_SECONDS = 10.0
_MOMENT_SECONDS = 0.25
_STOPPED = ("T", "t", "Z", "X", "")
_ASLEEP = (*_STOPPED, "D")
"""With the signal waiting for it, one in an uninterruptible sleep runs no more either. A parent sleeps so
until its new child has begun its program (vfork), which a child that was stopped first never does."""


def pause(directory: SandboxDirectory, inner: ProcessMark) -> None:
    """Returns when nothing in it runs. What is stopped cannot fork, so looking again finds what was missed."""
    directory.set_paused(True)
    began = time.monotonic()
    while running := [pid for pid in _own(inner) if _state(pid) not in _STOPPED]:
        waited = time.monotonic() - began
        if waited > _MOMENT_SECONDS and all(_state(pid) in _ASLEEP for pid in running):
            return
        if waited > _PATIENCE_SECONDS:
            resume(directory, inner)
            raise SandboxUnavailableError(
                "its processes do not stop", provider="local", sandbox_id=directory.sandbox_id, retryable=True
            )
        send(inner, running, signal.SIGSTOP)
        time.sleep(0.002)


def resume(directory: SandboxDirectory, inner: ProcessMark) -> None:
    directory.set_paused(False)
    send(inner, _own(inner), signal.SIGCONT)


def paused(sandbox_id: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        "the sandbox is paused: resume() it first", provider="local", sandbox_id=sandbox_id
    )


def _own(inner: ProcessMark) -> list[int]:
    """All but process 1, which is ours and only reaps."""
    return [pid for pid in members(inner.pid) if pid != inner.pid]


def _state(pid: int) -> str:
    """Of the process; of its other threads where the first one has left, which is a zombie until they have."""
    own = state(pid)
    if own not in ("Z", "X"):
        return own
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            other = state(int(thread))
            if other not in _STOPPED:
                return other
    return own
