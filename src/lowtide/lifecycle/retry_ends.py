"""Ends that failed: tried again, ever more slowly, for as long as the owner lives.

After its death the guardian goes on. Before, an end that failed because the ledger could not be written
has left no mark there, so only the owner knows of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lowtide.lifecycle import keep
from lowtide.lifecycle.claim import Claim
from lowtide.lifecycle.end import end_lease
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.keep import Decision
from lowtide.lifecycle.lease import LeaseState

if TYPE_CHECKING:
    from lowtide.lifecycle.leases import Lifecycle

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0


async def until_over(life: Lifecycle, held: HeldLease, decision: Decision) -> None:
    """Try once more after a pause; an attempt that fails comes here again by itself."""
    held.failures += 1
    failures, ended = held.failures, held.ending
    await asyncio.sleep(min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(failures - 1, 10)))
    still = life.held.get(held.lease.lease_id) is held
    if still and not held.over and held.ending is ended:  # else somebody else has tried meanwhile
        held.ending = asyncio.ensure_future(life.end_held(held, decision, Claim.OWN))
        await asyncio.wait([held.ending])


async def what_exec_left(life: Lifecycle) -> None:
    """Leases of this process from before its exec. Those of a twin (a subinterpreter) are not ours to end."""
    for lease in await life.ledger.leases():
        if lease.state is LeaseState.KEPT or not lease.owner.replaced_by(life.owner):
            continue
        held = next((h for h in life.held.values() if h.lease.provider == lease.provider), None)
        if held is not None:
            await end_lease(
                life.ledger,
                held.provider,
                lease,
                owner=lease.owner,
                decision=keep.decide(lease, failed=True),
            )
