"""Renewal by the owner: the second line behind the guardian, and the place where it hears of a new owner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lowtide import logger
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.lease import LEASE_SECONDS, Lease, LeaseState
from lowtide.lifecycle.provider_lifetime import renew_lease

if TYPE_CHECKING:
    from lowtide.lifecycle.leases import Lifecycle

log = logger.get("lowtide.lifecycle")

SHARE = 1 / 2
"""The guardian renews when a third of the lifetime has passed, the owner at half if it did not."""


async def while_holding(life: Lifecycle) -> None:
    """Look at every lease that is held, again and again, until none is."""
    while life.held:
        shortest = min(held.lease.lifetime_seconds or LEASE_SECONDS for held in life.held.values())
        await asyncio.sleep(shortest / 8)
        if life.guardian is not None:
            life.guardian.look_again()
        for held in list(life.held.values()):
            if held.lease.sandbox_id is None or held.ending is not None:
                continue
            try:
                await _look(life, held)
            except Exception as error:  # the ledger: the provider-side lifetime is moved all the same
                log.warning("lease %s: %s", held.lease.lease_id, error)
                if held.lease.renewal_due(SHARE):
                    await renew(life, held)


async def _look(life: Lifecycle, held: HeldLease) -> None:
    row = await life.ledger.get(held.lease.lease_id)
    if row is None or held.ending is not None:
        return
    if row.owner != life.owner or row.state is LeaseState.HANDED_OVER:
        _let_go(life, row)
    elif row.state is LeaseState.LIVE and row.renewal_due(SHARE):
        await renew(life, held)


def _let_go(life: Lifecycle, row: Lease) -> None:
    life.held.pop(row.lease_id, None)
    log.warning(
        "sandbox %s (%s) belongs to process %d on %s now; this process neither renews nor ends it any more",
        row.sandbox_id,
        row.provider,
        row.owner.pid,
        row.owner.host,
    )


async def renew(life: Lifecycle, held: HeldLease) -> None:
    """Move the provider-side lifetime of one that is held."""
    lease = held.lease
    if lease.sandbox_id is None or lease.lifetime_seconds is None:
        return
    try:
        held.lease = await renew_lease(life.ledger, held.provider, lease) or held.lease
    except Exception as error:  # whatever it is: nobody else comes back to those that this process holds
        log.warning("lease %s (%s): renewal failed: %r", lease.lease_id, held.provider.name, error)
