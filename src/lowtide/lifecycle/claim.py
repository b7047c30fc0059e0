"""Which leases an end may touch: its own, those that nobody owns, or whichever somebody named."""

from __future__ import annotations

import enum

from lowtide.lifecycle.lease import EndReport, Lease, LeaseState, Outcome
from lowtide.lifecycle.owner import Owner, Standing
from lowtide.providers.base import Provider

OWNED = frozenset({LeaseState.INTENDED, LeaseState.LIVE, LeaseState.ENDING})
"""The states in which a lease belongs to its owner. One that is kept or released is nobody's."""


class Claim(enum.Enum):
    """Which leases an end may touch."""

    OWN = "own"  # those of this process: stop, close, exit, signals
    UNOWNED = "unowned"  # and those that nobody owns any more: kept, released, orphaned
    ANY = "any"  # whichever: somebody named it


def may_claim(lease: Lease, provider: Provider, claim: Claim, me: Owner) -> bool:
    """Whether that lease may be ended under this claim, by what its row says now."""
    if lease.state is LeaseState.GONE:
        return False
    if claim is Claim.ANY or (lease.state in OWNED and lease.owner == me):
        return True
    if claim is Claim.OWN:
        return False
    return lease.state not in OWNED or is_dead(lease.owner.verdict().standing, provider)


def is_dead(standing: Standing, provider: Provider) -> bool:
    """Proven. A restart of the machine is the end of its processes, but a hosted sandbox may be a clone's by now."""
    if standing is Standing.RESTARTED:
        return not provider.traits.outlives_machine
    return standing is Standing.DEAD


def let_be(row: Lease | None, provider: Provider) -> EndReport:
    """The report of an end that touches nothing: it is over already, or it is not ours to end."""
    outcome, why = Outcome.LEFT, ""
    if row is None or row.state is LeaseState.GONE:
        outcome, why = Outcome.ALREADY_GONE, "it had already ended"
    elif row.state is LeaseState.KEPT:
        outcome, why = Outcome.KEPT, f"it is kept; end it with Sandbox.delete({row.sandbox_id!r})"
    elif row.state is LeaseState.HANDED_OVER:
        why = f"it was released; end it with Sandbox.delete({row.sandbox_id!r})"
    else:
        why = f"it belongs to process {row.owner.pid} on {row.owner.host}"
    sandbox_id = row.sandbox_id if row is not None else None
    return EndReport(outcome=outcome, sandbox_id=sandbox_id, provider=provider.name, seconds=0.0, why=why)
