"""How long a sandbox may live on its provider when everything of ours is gone."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime

from lowtide import settings
from lowtide.errors import ValidationError
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.lease import LEASE_SECONDS, Lease, LeaseState, renewal_seconds
from lowtide.lifecycle.ledger import Ledger
from lowtide.lifecycle.recover import remembered
from lowtide.providers.base import Capability, Provider, SandboxSpec
from lowtide.providers.optional import Renews


def lease_seconds(provider: Provider) -> float | None:
    """How far ahead a renewed lifetime reaches; None where the provider cannot renew one."""
    if not {Capability.LIFETIME, Capability.RENEW} <= provider.capabilities:
        return None
    seconds = settings.seconds(settings.LEASE_SECONDS)
    most = provider.traits.max_lifetime_seconds
    return min(seconds, most) if most else seconds


def with_lifetime(provider: Provider, lease: Lease, spec: SandboxSpec) -> tuple[Lease, SandboxSpec]:
    """Put the hard provider-side lifetime into the create call, and remember it in the row."""
    asked = None
    if lease.max_lifetime_at is not None:
        asked = lease.max_lifetime_at - lease.created_at
    step = lease_seconds(provider)
    lifetime = asked
    if step is not None:
        lifetime = min(step, asked) if asked is not None else step
    elif Capability.LIFETIME in provider.capabilities and lifetime is None:
        lifetime = provider.traits.default_lifetime_seconds
    lease = replace(
        lease,
        lifetime_seconds=step,
        expires_at=lease.created_at + lifetime if lifetime is not None else None,
        recovery=remembered(provider, spec),
    )
    fixed = asked if asked is not None else provider.traits.default_lifetime_seconds
    return lease, replace(
        spec, lifetime_seconds=lifetime, fixed_lifetime_seconds=fixed if step is not None else None
    )


async def extend(provider: Provider, sandbox_id: str, seconds: float) -> float | None:
    """Move the provider-side lifetime that far; the new expiry where the provider can."""
    if not isinstance(provider, Renews):
        return None
    most = provider.traits.max_lifetime_seconds
    until: datetime | None = await provider.renew(sandbox_id, min(seconds, most) if most else seconds)
    return until.timestamp() if until is not None else None


async def extend_as_allowed(provider: Provider, lease: Lease, seconds: float) -> float | None:
    """As `extend`; where an account allows less than its provider, half of it, until that is no more than a renewal."""
    while lease.sandbox_id is not None:
        try:
            return await extend(provider, lease.sandbox_id, seconds)
        except ValidationError:
            least = lease.lifetime_seconds or LEASE_SECONDS
            if seconds <= least:
                raise
            seconds = max(least, seconds / 2)
    return None


async def renew_lease(ledger: Ledger, provider: Provider, lease: Lease) -> Lease | None:
    """Move the provider-side lifetime of a live lease, and write that down. Whoever keeps or releases it meanwhile
    has the last word, though the provider may have heard us last: then its lifetime is moved there again."""
    if lease.sandbox_id is None:
        return None
    asked = Instant.now()
    until = await extend(provider, lease.sandbox_id, renewal_seconds(lease))
    noted = await ledger.change(
        lease.lease_id, LeaseState.LIVE, before={LeaseState.LIVE}, expires_at=until, renewed=asked
    )
    row = noted or await ledger.get(lease.lease_id)
    if row is not None and row.state in (LeaseState.KEPT, LeaseState.HANDED_OVER):
        left = row.keep_for_seconds if row.kept_until is None else max(1.0, row.kept_until - time.time())
        until = await extend_as_allowed(provider, lease, left)
        await ledger.note(lease.lease_id, "", expires_at=until)
    return noted
