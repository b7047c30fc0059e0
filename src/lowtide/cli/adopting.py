"""Adopting from the command line: this process ends at once, so what it adopts is kept until a time."""

from __future__ import annotations

from lowtide.cli.addressing import lease_named
from lowtide.defaults import default_provider
from lowtide.errors import SandboxGone, SandboxNotFoundError
from lowtide.lifecycle.lease import Keep, Lease, Outcome
from lowtide.lifecycle.leases import lifecycle
from lowtide.providers import registry


async def adopt_and_keep(text: str, provider: str | None, keep_for_seconds: float, take: bool) -> Lease:
    """Move the lease here in one step of the ledger, then keep it. As `Session.adopt` raises; SandboxGone."""
    row = await lease_named(text, provider)
    place = registry.provider(row.provider if row else provider or default_provider())
    if row is not None and row.sandbox_id is None:
        raise SandboxNotFoundError(
            f"{text} is still being created; try again in a moment", provider=place.name
        )
    sandbox_id = (row.sandbox_id if row else None) or text
    mine = lifecycle()
    lease = await mine.adopt(place, sandbox_id, take=take)
    await mine.ledger.note(lease.lease_id, "", keep=Keep.ALWAYS, keep_for_seconds=keep_for_seconds)
    mine.held.pop(lease.lease_id, None)  # what is kept is nobody's to end at exit
    report = await mine.end(place, lease.lease_id)
    if report.error is not None:
        raise report.error
    kept = await mine.ledger.get(lease.lease_id)
    if report.outcome is not Outcome.KEPT or kept is None:
        raise SandboxGone(
            f"{sandbox_id} ended before it could be kept",
            provider=place.name,
            sandbox_id=sandbox_id,
            reason="ended",
        )
    return kept
