"""What CoreWeave says about its sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from lowtide.errors import SandboxNotFoundError
from lowtide.providers.base import SandboxInfo, SandboxSpec, SandboxState
from lowtide.providers.coreweave.access import messages
from lowtide.providers.coreweave.create import labels_of
from lowtide.providers.coreweave.errors import SERVICE
from lowtide.providers.hosted import is_id, is_of_lease, is_word
from lowtide.providers.hosted.grpc_calls import Connections
from lowtide.providers.inside.program import EXPIRED

SECONDS = 15.0
_PAGE = 100
_STATES = {
    "STATE_RUNNING": SandboxState.RUNNING,
    "STATE_PAUSED": SandboxState.PAUSED,
    "STATE_TERMINATING": SandboxState.ENDING,
    "STATE_COMPLETED": SandboxState.COMPLETED,
    "STATE_FAILED": SandboxState.FAILED,
    "STATE_TERMINATED": SandboxState.GONE,
}
"""All others are on their way to running."""


def info(box: Any) -> SandboxInfo:
    """From the service's message."""
    pb, status = messages(), box.status
    state = _STATES.get(
        pb.State.Name(status.state) if status.state in pb.State.values() else "", SandboxState.PENDING
    )
    code = status.exit_code if status.HasField("exit_code") else None
    reason = status.state_reason or None
    if state is SandboxState.FAILED and code == EXPIRED:
        reason = "expired"
    created: datetime | None = None
    if status.create_time.seconds:
        with suppress(ValueError, OverflowError, OSError):  # no time at all
            created = datetime.fromtimestamp(status.create_time.ToNanoseconds() / 1e9, UTC)
    return SandboxInfo(
        sandbox_id=box.sandbox_id,
        state=state,
        labels=labels_of(box.spec.tags),
        created_at=created,
        exit_code=code if state in (SandboxState.COMPLETED, SandboxState.FAILED) else None,
        reason=reason if state.terminal else None,
    )


def of_lease(box: Any, spec: SandboxSpec) -> SandboxInfo | None:
    """What a replayed create answered with; None for another's sandbox, which would be ended with this lease, or for none."""
    found = info(box)
    return found if is_id(found.sandbox_id) and is_of_lease(found.labels, spec.labels) else None


async def message(connections: Connections, sandbox_id: str) -> Any:
    """The service's own description. Raises SandboxNotFoundError; an answer about another one, or none, is no proof."""
    if not is_word(sandbox_id):
        raise SERVICE.missing(sandbox_id)
    asked = messages().GetSandboxRequest(sandbox_id=sandbox_id)
    box = await connections.call("GetSandbox", asked, SECONDS, sandbox_id)
    SERVICE.check_about(sandbox_id, box.sandbox_id)
    return box


async def get(connections: Connections, sandbox_id: str) -> SandboxInfo:
    """Raises SandboxNotFoundError, also for one that lowtide has not made: it has none of its labels."""
    found = info(await message(connections, sandbox_id))
    if "lowtide-lease" not in found.labels:
        raise SERVICE.error(SandboxNotFoundError, f"{sandbox_id} is not a lowtide sandbox", sandbox_id)
    return found


async def listed(
    connections: Connections, tags: Sequence[str], *, ended: bool = False
) -> AsyncIterator[SandboxInfo]:
    """All pages of those with all of these tags; those that are over only with `ended`.

    The service filters; that it did is checked, because what is found for a lease is ended with it.
    """
    asked = messages().ListSandboxesRequest(page_size=_PAGE, tags=tags, show_terminated=ended)
    async for box in connections.pages("ListSandboxes", asked, "sandboxes", SECONDS):
        found = info(box)
        if "lowtide-lease" in found.labels and set(tags) <= set(box.spec.tags):
            yield found
