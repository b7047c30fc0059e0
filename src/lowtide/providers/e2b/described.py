"""What E2B says about a sandbox, in lowtide's words."""

from __future__ import annotations

from typing import Any

from lowtide import errors
from lowtide.providers.base import SandboxInfo, SandboxState


def info_of(found: Any) -> SandboxInfo:
    paused = str(getattr(found.state, "value", found.state)) == "paused"
    return SandboxInfo(
        sandbox_id=found.sandbox_id,
        state=SandboxState.PAUSED if paused else SandboxState.RUNNING,
        labels=metadata_of(found),
        created_at=found.started_at,
        expires_at=None if paused else found.end_at,
    )


def metadata_of(found: Any) -> dict[str, str]:
    given = found.metadata
    if isinstance(given, dict):
        return dict(given)
    kept = getattr(given, "additional_properties", None)
    return dict(kept) if isinstance(kept, dict) else {}


def failed(sandbox_id: str) -> errors.SandboxFailedError:
    return errors.SandboxFailedError(
        f"sandbox {sandbox_id} exists but does not run",
        reason="not running",
        provider="e2b",
        sandbox_id=sandbox_id,
    )


def gone(sandbox_id: str) -> errors.SandboxGone:
    return errors.SandboxGone(
        f"sandbox {sandbox_id} has ended", reason="ended", provider="e2b", sandbox_id=sandbox_id
    )
