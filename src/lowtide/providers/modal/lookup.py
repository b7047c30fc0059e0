"""What Modal says of a sandbox, as `SandboxInfo`."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.providers.base import Labels, SandboxInfo, SandboxState
from lowtide.providers.inside import program

TERMINATED = 137
"""The return code of a sandbox that was terminated."""


def info(sandbox_id: str, tags: Mapping[str, str], code: int | None) -> SandboxInfo:
    """`code` is its return code; None: it runs."""
    state, reason = SandboxState.RUNNING, None
    if code == 0:
        state, reason = SandboxState.COMPLETED, "exited"
    elif code == TERMINATED:
        state, reason = SandboxState.GONE, "terminated"
    elif code == program.EXPIRED:  # the lease's own end, or Modal's
        state, reason = SandboxState.FAILED, "expired"
    elif code is not None:
        state, reason = SandboxState.FAILED, f"its main process ended with {code}"
    return SandboxInfo(
        sandbox_id=sandbox_id,
        state=state,
        labels=dict(tags),
        exit_code=code if state in (SandboxState.COMPLETED, SandboxState.FAILED) else None,
        reason=reason,
    )


def is_ours(tags: Mapping[str, str]) -> bool:
    return Labels.from_dict(tags) is not None
