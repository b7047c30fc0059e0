"""Ends that failed: tried again, ever more slowly, for as long as the owner lives.

After its death the guardian goes on. Before, an end that failed because the ledger could not be written
has left no mark there, so only the owner knows of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lowtide.lifecycle.end import Claim
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.keep import Decision

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
