"""One create call under its lease: written down before, settled after, whatever becomes of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide import logger
from lowtide.errors import (
    LedgerError,
    LowtideError,
    RateLimitError,
    RequestTimeoutError,
    SandboxGone,
    SandboxUnavailableError,
)
from lowtide.lifecycle.claim import Claim
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import LeaseState, Outcome
from lowtide.lifecycle.ledger import OPEN_STATES
from lowtide.lifecycle.recover import create_window_seconds
from lowtide.providers.base import Provider, SandboxInfo, SandboxSpec

if TYPE_CHECKING:
    from lowtide.lifecycle.leases import Lifecycle

log = logger.get("lowtide.lifecycle")

_END_SECONDS = 60.0
"""How long the end of what a failed create made may take, after its create window."""


async def create(life: Lifecycle, held: HeldLease, spec: SandboxSpec) -> SandboxInfo:
    """The row, then the request, then the row with what came of it."""
    provider, lease = held.provider, held.lease
    point("create:before-intent")
    try:
        await life.ledger.intend(lease, durable=provider.traits.outlives_machine)
    except BaseException:  # not written down: so the provider is not asked
        life.held.pop(lease.lease_id, None)
        raise
    point("create:intended")
    asked = Instant.now()
    try:
        info = await provider.create(spec)
    except BaseException as error:
        held.lease = replace(lease, request_ended=Instant.now())
        if isinstance(error, LowtideError) and error.nothing_sent:
            await _never_asked(life, held, f"refused: {error}")
        elif held.ending is None:
            # The answer is lost or says no: either way something may exist. Look, and end it.
            why = f"create failed: {str(error) or type(error).__name__}"
            decision = Decision(Fate.DESTROY, why)
            life.start_end(
                held,
                decision,
                Claim.OWN,
                answered=_is_answer(error),
                deadline_seconds=create_window_seconds(provider) + _END_SECONDS,
            )
        raise
    point("create:answered")
    try:
        live = await life.ledger.change(
            lease.lease_id,
            LeaseState.LIVE,
            before={LeaseState.INTENDED},
            owned_by=life.owner,
            sandbox_id=info.sandbox_id,
            renewed=asked,
        )
    except LedgerError as error:
        held.lease = replace(lease, sandbox_id=info.sandbox_id)
        raise await _made_but_not_written(life, held, error) from error
    point("create:live")
    if live is None:
        # Somebody ended the lease while the request was on its way. The loser destroys what it holds.
        held.lease = replace(lease, sandbox_id=info.sandbox_id)
        await _destroy_late(life, held, info.sandbox_id)
        raise ended_while_created(provider, info.sandbox_id)
    held.lease = live
    log.info("lease %s (%s): live as %s", lease.lease_id, provider.name, info.sandbox_id)
    return info


async def _never_asked(life: Lifecycle, held: HeldLease, why: str) -> None:
    """Settle the row of a create that failed before anything was sent."""
    lease_id = held.lease.lease_id
    try:
        await life.ledger.change(lease_id, LeaseState.GONE, before=OPEN_STATES, why=why)
    except LedgerError as error:
        log.warning("lease %s: %s", lease_id, error)
        life.start_end(held, Decision(Fate.DESTROY, why), Claim.OWN, answered=True)
        return
    life.held.pop(lease_id, None)


async def _made_but_not_written(life: Lifecycle, held: HeldLease, error: LedgerError) -> LedgerError:
    """The provider has made it, and its id cannot be written down: so it must not stay."""
    held.creating = None  # it has its answer; the end has nothing to wait for
    report = await asyncio.shield(
        life.start_end(held, Decision(Fate.DESTROY, "its row could not be written"), Claim.OWN)
    )
    became = "was ended again"
    if report.outcome is Outcome.FAILED:
        became = f"could not be ended yet ({report.why}) and is tried again while this process lives"
    return LedgerError(
        f"{error}; sandbox {held.lease.sandbox_id}, which had just been made, {became}",
        provider=held.provider.name,
        sandbox_id=held.lease.sandbox_id,
        retryable=error.retryable,
    )


async def _destroy_late(life: Lifecycle, held: HeldLease, sandbox_id: str) -> None:
    try:
        await life.ledger.note(held.lease.lease_id, "created after its end", sandbox_id=sandbox_id)
    except LedgerError as error:
        log.warning("lease %s: %s", held.lease.lease_id, error)
    try:
        await held.provider.destroy(sandbox_id)
    except LowtideError as error:  # the row is ENDING and is tried again
        log.warning("destroying %s %s: %s", held.provider.name, sandbox_id, error)


def ended_while_created(provider: Provider, what: str) -> SandboxGone:
    return SandboxGone(
        f"sandbox {what} was ended while it was being created",
        provider=provider.name,
        sandbox_id=what,
        reason="ended",
    )


def _is_answer(error: BaseException) -> bool:
    """Whether the create was refused; else its answer is lost. What a refusal proves, `recover` decides."""
    if isinstance(error, RateLimitError):
        return True
    lost = (SandboxUnavailableError, RequestTimeoutError)
    return isinstance(error, LowtideError) and not isinstance(error, lost)
