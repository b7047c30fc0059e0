"""What the service does to a sandbox by itself, and when: auto-stop, auto-pause, auto-archive, auto-delete, expiry."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lowtide.emulators.daytona.sandbox import Sandbox, SandboxState

LONGEST_ARCHIVE_MINUTES = 30 * 24 * 60


class Action(enum.Enum):
    STOP = "stop"
    PAUSE = "pause"
    ARCHIVE = "archive"
    DESTROY = "destroy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    at: float
    action: Action


def next_due(sandbox: Sandbox) -> Due | None:
    """The first thing that will happen if nobody does anything.

    Times follow from when things should have happened, not from when they were done: a clock that is
    moved over several of them at once sees all of them.
    """
    coming: list[Due] = []
    if sandbox.destroy_at is not None:
        coming.append(Due(at=sandbox.destroy_at, action=Action.DESTROY))
    intervals = sandbox.intervals
    if sandbox.state is SandboxState.STARTED:
        if intervals.pause > 0:
            coming.append(Due(at=sandbox.last_activity_at + intervals.pause * 60, action=Action.PAUSE))
        elif intervals.stop > 0:
            coming.append(Due(at=sandbox.last_activity_at + intervals.stop * 60, action=Action.STOP))
    if sandbox.state in (SandboxState.STOPPED, SandboxState.ARCHIVED) and intervals.delete >= 0:
        coming.append(Due(at=sandbox.stopped_at + intervals.delete * 60, action=Action.DESTROY))
    if sandbox.state is SandboxState.STOPPED:
        minutes = intervals.archive or LONGEST_ARCHIVE_MINUTES
        coming.append(Due(at=sandbox.stopped_at + minutes * 60, action=Action.ARCHIVE))
    return min(coming, key=lambda due: due.at, default=None)
