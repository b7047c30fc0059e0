"""The guardian's upkeep: renewing leases of living owners, asking about lost ones, keeping the ledger small."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from lowtide.errors import SandboxGone, SandboxNotFoundError
from lowtide.lifecycle import ask_provider, clock
from lowtide.lifecycle.ask_provider import Sighting, Testimony
from lowtide.lifecycle.backoff import MOST_SECONDS, Retries
from lowtide.lifecycle.guardian_workers import NoCredentials, Workers
from lowtide.lifecycle.lease import LEASE_SECONDS, Lease, LeaseState
from lowtide.lifecycle.provider_lifetime import renew_lease
from lowtide.lifecycle.sqlite_ledger import SqliteLedger

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


class Upkeep:
    """What is done for the living and for the ledger. Ends nothing."""

    def __init__(self, ledger: SqliteLedger, workers: Workers, retries: Retries) -> None:
        self._ledger = ledger
        self._workers = workers
        self._retries = retries
        self._renewing: set[str] = set()
        self._asked: dict[str, _Seen] = {}
        self._ask_at: dict[str, float] = {}
        self._pruned_at: float | None = None

    def only(self, lease_ids: Collection[str]) -> None:
        """Forget the others."""
        for lease_id in self._ask_at.keys() - set(lease_ids):
            del self._ask_at[lease_id]
            self._asked.pop(lease_id, None)

    # Renewal, when a third of the lifetime has passed.

    def renewal_due(self, lease: Lease) -> bool:
        return (
            lease.sandbox_id is not None
            and lease.renewal_due(2 / 3)
            and lease.lease_id not in self._renewing
            and self._retries.due("renew " + lease.lease_id)
        )

    async def _renew_with(self, account: str, lease: Lease) -> None:
        provider = self._workers.light(lease, account)
        try:
            if provider is None:
                await self._workers.renew(lease, account)
                return
            await renew_lease(self._ledger, provider, lease)
        except (SandboxNotFoundError, SandboxGone):
            if account != lease.account:  # another key that does not show it proves nothing
                raise
            # Ended by its provider or by somebody: nothing is left to renew, nor to end.
            await self._ledger.change(
                lease.lease_id,
                LeaseState.GONE,
                before={LeaseState.LIVE},
                owned_by=lease.owner,
                why="it is not there any more",
            )
            log.warning("lease %s (%s): it is not there any more", lease.lease_id, lease.provider)

    async def renew(self, lease: Lease) -> None:
        key = "renew " + lease.lease_id
        if lease.sandbox_id is None:
            return
        self._renewing.add(lease.lease_id)
        try:
            await self._workers.with_any_key(lease, lambda account: self._renew_with(account, lease))
        except Exception as error:
            # Never so long that the lease could end while its owner lives. Without credentials only an owner can change
            # that, and every attempt starts a process.
            most = (lease.lifetime_seconds or LEASE_SECONDS) / 10
            wait = self._retries.failed(key, most=MOST_SECONDS if isinstance(error, NoCredentials) else most)
            log.warning(
                "lease %s (%s): renewal failed: %s; tried again in %.0f s",
                lease.lease_id,
                lease.provider,
                error,
                wait,
            )
        else:
            self._retries.succeeded(key)
        finally:
            self._renewing.discard(lease.lease_id)

    # A hosted lease from before a restart.

    def ask_due(self, lease: Lease) -> bool:
        """Whether it is time to ask its provider about it (again)."""
        now = clock.seconds()
        return self._ask_at.get(lease.lease_id, 0.0) <= now and self._retries.due("ask " + lease.lease_id)

    async def abandoned(self, lease: Lease) -> str | None:
        """Why the lease has no owner; None while that is not proven. Raises what the request to the provider raises."""
        now = clock.seconds()
        period = lease.lifetime_seconds
        self._ask_at[lease.lease_id] = now + min(ASK_SECONDS, (period or LEASE_SECONDS) / 4)
        try:
            sighting = await self._ask(lease)
        except Exception as error:
            wait = self._retries.failed("ask " + lease.lease_id)
            log.warning(
                "lease %s (%s): %s; asked again in %.0f s", lease.lease_id, lease.provider, error, wait
            )
            raise
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
        return await (
            ask_provider.ask(provider, lease) if provider is not None else self._workers.look(lease)
        )

    # The ledger, over weeks.

    async def prune(self, *, now: bool = False) -> None:
        """Once an hour, and when there is nothing else to do."""
        elapsed = clock.seconds()
        if self._pruned_at is None:
            self._pruned_at = elapsed
        if elapsed - self._pruned_at < PRUNE_SECONDS and not now:
            return
        self._pruned_at = elapsed
        await self._ledger.forget(gone_before=time.time() - KEEP_GONE_SECONDS)
        await self._ledger.checkpoint()
