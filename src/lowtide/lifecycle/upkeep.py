"""The guardian's upkeep: renewing leases of living owners, asking about lost ones, keeping the ledger small."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from lowtide.lifecycle import witness
from lowtide.lifecycle.deadlines import Clock
from lowtide.lifecycle.ending import extend
from lowtide.lifecycle.lease import LEASE_SECONDS, Lease, renewal_seconds
from lowtide.lifecycle.ledger import SqliteLedger
from lowtide.lifecycle.retries import Retries
from lowtide.lifecycle.witness import Sighting, Testimony
from lowtide.lifecycle.workers import Workers

log = logging.getLogger("lowtide.guardian")

KEEP_GONE_SECONDS = 7 * 86_400.0
PRUNE_SECONDS = 3600.0
"""How often settled rows are dropped and the ledger's log is written back, while owners live."""
ASK_SECONDS = 30.0


@dataclass(slots=True)
class _Seen:
    """An expiry, and when it was first seen, by the clock that nobody sets."""

    expires_at: float | None
    since: float
    due: float = 0.0


class Upkeep:
    """What is done for the living and for the ledger. Ends nothing."""

    def __init__(self, ledger: SqliteLedger, workers: Workers, clock: Clock, retries: Retries) -> None:
        self._ledger = ledger
        self._workers = workers
        self._clock = clock
        self._retries = retries
        self._renewed: dict[str, _Seen] = {}
        self._asked: dict[str, _Seen] = {}
        self._ask_at: dict[str, float] = {}
        self._pruned_at: float | None = None

    def only(self, lease_ids: Collection[str]) -> None:
        """Forget the others."""
        for seen in (self._renewed, self._asked):
            for lease_id in seen.keys() - set(lease_ids):
                del seen[lease_id]
        for lease_id in self._ask_at.keys() - set(lease_ids):
            del self._ask_at[lease_id]

    # Renewal: each third of the lifetime, counted from when the last one was seen.

    def renewal_due(self, lease: Lease) -> bool:
        if lease.lifetime_seconds is None or lease.sandbox_id is None:
            return False
        now, third = self._clock.elapsed(), lease.lifetime_seconds / 3
        seen = self._renewed.get(lease.lease_id)
        if seen is None:
            # What is left may be off by as much as somebody set the clock; a third is left in any case.
            left = (lease.expires_at or 0.0) - self._clock.now()
            seen = _Seen(lease.expires_at, now, now + min(max(0.0, left - 2 * third), third))
            self._renewed[lease.lease_id] = seen
        elif seen.expires_at != lease.expires_at:  # somebody has renewed it
            seen = self._renewed[lease.lease_id] = _Seen(lease.expires_at, now, now + third)
        return seen.due <= now and self._retries.due("renew " + lease.lease_id)

    async def renew(self, lease: Lease) -> None:
        key = "renew " + lease.lease_id
        seen = self._renewed.get(lease.lease_id)
        if seen is None or lease.sandbox_id is None:
            return
        seen.due = self._clock.elapsed() + (lease.lifetime_seconds or LEASE_SECONDS) / 10  # not twice at once
        try:
            provider = self._workers.light(lease)
            if provider is not None:
                until = await extend(provider, lease.sandbox_id, renewal_seconds(lease))
                await self._ledger.note(lease.lease_id, "", expires_at=until)
            else:
                await self._workers.renew(lease)
        except Exception as error:
            # Never so long that the lease could end while its owner lives.
            wait = self._retries.failed(key, most=(lease.lifetime_seconds or LEASE_SECONDS) / 10)
            log.warning(
                "lease %s (%s): renewal failed: %s; tried again in %.0f s",
                lease.lease_id,
                lease.provider,
                error,
                wait,
            )
        else:
            self._retries.succeeded(key)

    # A hosted lease from before a restart.

    async def abandoned(self, lease: Lease) -> str | None:
        """Why nobody owns it any more; None while that is not proven."""
        now = self._clock.elapsed()
        if self._ask_at.get(lease.lease_id, 0.0) > now or not self._retries.due("ask " + lease.lease_id):
            return None
        period = lease.lifetime_seconds
        self._ask_at[lease.lease_id] = now + min(ASK_SECONDS, (period or LEASE_SECONDS) / 4)
        try:
            sighting = await self._ask(lease)
        except Exception as error:
            wait = self._retries.failed("ask " + lease.lease_id)
            log.warning(
                "lease %s (%s): %s; asked again in %.0f s", lease.lease_id, lease.provider, error, wait
            )
            return None
        self._retries.succeeded("ask " + lease.lease_id)
        if sighting.testimony is Testimony.NOT_THERE:
            return "it is not there any more"
        if sighting.testimony is Testimony.OVER:
            return "it ended with the restart"
        seen = self._asked.get(lease.lease_id)
        if seen is None or seen.expires_at != sighting.expires_at:
            self._asked[lease.lease_id] = _Seen(sighting.expires_at, now)
            return None
        if sighting.testimony is Testimony.NOTHING:  # its create has surely been answered by now
            return (
                "its owner was restarted while it was created" if now - seen.since > LEASE_SECONDS else None
            )
        if period is None or sighting.expires_at is None or now - seen.since < period:
            return None
        return f"nobody has renewed it for {period:.0f} s since the restart"

    async def _ask(self, lease: Lease) -> Sighting:
        provider = self._workers.light(lease)
        return await (witness.ask(provider, lease) if provider is not None else self._workers.look(lease))

    # The ledger, over weeks.

    async def prune(self, *, now: bool = False) -> None:
        """Once an hour, and when there is nothing else to do."""
        elapsed = self._clock.elapsed()
        if self._pruned_at is None:
            self._pruned_at = elapsed
        if elapsed - self._pruned_at < PRUNE_SECONDS and not now:
            return
        self._pruned_at = elapsed
        await self._ledger.forget(gone_before=self._clock.now() - KEEP_GONE_SECONDS)
        await self._ledger.checkpoint()
