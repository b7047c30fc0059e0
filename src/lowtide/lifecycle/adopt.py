"""Adoption: a sandbox that nobody owns gets an owner; with `take`, one that somebody owns gets another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.errors import SandboxGone, SandboxOwnedError
from lowtide.lifecycle import renew
from lowtide.lifecycle.claim import is_dead
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.provider_lifetime import lease_seconds
from lowtide.providers.base import Labels, Provider, SandboxInfo

if TYPE_CHECKING:
    from lowtide.lifecycle.leases import Lifecycle

ADOPTABLE = frozenset({LeaseState.LIVE, LeaseState.KEPT, LeaseState.HANDED_OVER})


async def adopt(
    life: Lifecycle, provider: Provider, sandbox_id: str, *, session: str | None, take: bool
) -> Lease:
    """Make this process the owner. In the ledger that is one step: there is always exactly one owner.

    SandboxOwnedError for one whose owner lives or cannot be seen from here, unless `take`.
    """
    life.prepare(provider)
    info = await provider.get(sandbox_id)
    row = await life.lease_for(provider, sandbox_id)
    if row is None or row.state is LeaseState.GONE:
        lease = await _write_down(life, provider, info, session, known=row is not None, take=take)
    elif row.lease_id in life.held and row.owner == life.owner:
        held = life.held[row.lease_id]
        await life.ledger.note(row.lease_id, "", session=session)
        held.lease = replace(held.lease, session=session)
        return held.lease
    else:
        lease = await _move_here(life, provider, row, session, take=take)
    held = life.held[lease.lease_id] = HeldLease(provider, lease)
    if lease.lifetime_seconds is not None:
        await renew.renew(life, held)
    life.look_after()
    return held.lease


async def _move_here(
    life: Lifecycle, provider: Provider, row: Lease, session: str | None, *, take: bool
) -> Lease:
    if row.state is LeaseState.LIVE and row.owner != life.owner and not take:
        verdict = row.owner.verdict()
        if not is_dead(verdict.standing, provider):
            raise _owned(provider, row.sandbox_id, verdict.why)
    lease = await life.ledger.change(
        row.lease_id,
        LeaseState.LIVE,
        before={row.state} & ADOPTABLE,
        owned_by=row.owner,
        why=f"adopted by process {life.owner.pid}",
        owner=life.owner,
        session=session,
        kept_until=None,
        lifetime_seconds=row.lifetime_seconds or lease_seconds(provider),
    )
    if lease is None:
        raise SandboxGone(
            f"sandbox {row.sandbox_id} is being ended, or has just got another owner, and cannot be adopted",
            provider=provider.name,
            sandbox_id=row.sandbox_id,
            reason="ended",
        )
    return lease


async def _write_down(
    life: Lifecycle, provider: Provider, info: SandboxInfo, session: str | None, *, known: bool, take: bool
) -> Lease:
    """A row for a sandbox without one: made under another ledger, or by other means than lowtide."""
    labels = Labels.from_dict(info.labels)
    if labels is not None and not known and not take:
        raise _owned(provider, info.sandbox_id, "it was made under another ledger")
    lease = replace(
        life.new_lease(provider, tags=labels.tags if labels else (), session=session),
        state=LeaseState.LIVE,
        sandbox_id=info.sandbox_id,
        lifetime_seconds=lease_seconds(provider),
        reason=f"adopted by process {life.owner.pid}; it had no open row in this ledger",
    )
    await life.ledger.intend(lease)
    return lease


def _owned(provider: Provider, sandbox_id: str | None, whose: str) -> SandboxOwnedError:
    return SandboxOwnedError(
        f"sandbox {sandbox_id} is not free: {whose}; adopt(..., take=True) or `lowtide adopt --take` takes it",
        provider=provider.name,
        sandbox_id=sandbox_id,
    )
