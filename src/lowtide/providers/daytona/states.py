"""What Daytona says about a sandbox, in lowtide's words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lowtide.providers.base import SandboxInfo, SandboxState

_STATES = {
    "started": SandboxState.RUNNING,
    "resizing": SandboxState.RUNNING,
    "snapshotting": SandboxState.RUNNING,
    "forking": SandboxState.RUNNING,
    "stopping": SandboxState.STOPPED,
    "stopped": SandboxState.STOPPED,
    "archiving": SandboxState.STOPPED,
    "archived": SandboxState.STOPPED,
    "pausing": SandboxState.PAUSED,
    "paused": SandboxState.PAUSED,
    "destroying": SandboxState.ENDING,
    "destroyed": SandboxState.GONE,
    "error": SandboxState.FAILED,
    "build_failed": SandboxState.FAILED,
}


def word(found: Any) -> str:
    """Daytona's own word for the state."""
    state = found.state
    return str(getattr(state, "value", state) or "unknown")


def info(found: Any) -> SandboxInfo:
    """From the SDK's sandbox, its answer to a get, or an entry of a list."""
    return SandboxInfo(
        sandbox_id=str(found.id),
        state=_STATES.get(word(found), SandboxState.PENDING),
        labels=dict(found.labels or {}),
        created_at=moment(found.created_at),
        expires_at=moment(getattr(found, "auto_destroy_at", None)),
        reason=found.error_reason,
    )


def moment(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        read = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return read if read.tzinfo is not None else read.replace(tzinfo=UTC)
