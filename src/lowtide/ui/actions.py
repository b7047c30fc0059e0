"""What a person can do to a sandbox from a view of the fleet. All functions run on lowtide's event loop."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lowtide.errors import LowtideError, SandboxGone, SandboxNotFoundError
from lowtide.lifecycle.claim import Claim
from lowtide.lifecycle.lease import EndReport, Keep, Lease, LeaseState, Outcome
from lowtide.lifecycle.leases import lifecycle
from lowtide.lifecycle.ledger import HistoryLine
from lowtide.lifecycle.sweep import Action, Finding, sweep
from lowtide.providers import registry
from lowtide.ui.fleet import Row

KEEP_SECONDS = 86_400.0


async def stop(row: Row, *, grace_seconds: float = 10.0) -> EndReport:
    """Destroy the sandbox, whoever owns it and whether it is kept or not: a person named it."""
    place = registry.provider(row.provider)
    if row.lease_id is not None:
        return await lifecycle().end(
            place, row.lease_id, grace_seconds=grace_seconds, force=True, claim=Claim.ANY
        )
    started = time.monotonic()
    ended = await lifecycle().destroy(place, row.id)
    return EndReport(
        outcome=Outcome.DESTROYED if ended else Outcome.ALREADY_GONE,
        sandbox_id=row.id,
        provider=place.name,
        seconds=time.monotonic() - started,
    )


async def keep(row: Row, *, keep_for_seconds: float = KEEP_SECONDS, take: bool = False) -> Lease:
    """Keep the sandbox until a time, whoever exits. SandboxOwnedError where a living process owns it, unless `take`."""
    place = registry.provider(row.provider)
    if row.state == "pending":
        raise SandboxNotFoundError(
            f"{row.id} is still being created; try again in a moment", provider=place.name
        )
    mine = lifecycle()
    lease = await mine.adopt(place, row.id, take=take)
    await mine.ledger.note(lease.lease_id, "", keep=Keep.ALWAYS, keep_for_seconds=keep_for_seconds)
    mine.held.pop(
        lease.lease_id, None
    )  # this process may exit at any time: what is kept must not end with it
    report = await mine.end(place, lease.lease_id)
    if report.error is not None:
        raise report.error
    kept = await mine.ledger.get(lease.lease_id)
    if report.outcome is not Outcome.KEPT or kept is None:
        raise SandboxGone(
            f"{row.id} ended before it could be kept",
            provider=place.name,
            sandbox_id=row.id,
            reason="ended",
        )
    return kept


async def history(row: Row) -> Sequence[HistoryLine]:
    """Every change of the lease, oldest first; empty for a sandbox without one in this ledger."""
    return [] if row.lease_id is None else await lifecycle().ledger.history(row.lease_id)


async def run_sweep(providers: Sequence[str], *, dry_run: bool) -> list[Finding]:
    """Sweep these providers. A provider that cannot be connected is a finding."""
    places, findings = {}, []
    for name in providers:
        try:
            places[name] = registry.provider(name)
        except LowtideError as error:
            findings.append(
                Finding(action=Action.FAILED, provider=name, sandbox_id=None, lease_id=None, why=str(error))
            )
    return findings + await sweep(lifecycle().ledger, places, dry_run=dry_run)


def can_be_entered(row: Row) -> bool:
    """Whether commands can run in the sandbox now."""
    return row.state in ("running", STATE_KEPT)


STATE_KEPT = str(LeaseState.KEPT)
