"""Ending one lease: the same steps whoever does it, the owner, the guardian or a sweep.

claim the row (ENDING) -> find what a lost create may have made -> destroy -> confirm (GONE).
The claim compares the owner and the state and sets them in one step: what has got another owner, or is
kept or released, is left. A row only becomes GONE after the provider has confirmed; every failure
leaves it where it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

from lowtide import logger
from lowtide.errors import (
    LedgerError,
    LowtideError,
    SandboxGone,
    SandboxNotFoundError,
    without_secrets,
)
from lowtide.lifecycle import keep
from lowtide.lifecycle.claim import OWNED, Claim, let_be, may_claim
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import EndReport, Lease, LeaseState, Outcome
from lowtide.lifecycle.ledger import Ledger
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.provider_lifetime import extend_as_allowed
from lowtide.lifecycle.recover import (
    another_account,
    is_shown,
    patiently,
    recover,
    recovery_spec,
    request_ended,
)
from lowtide.providers.base import Provider, SandboxSpec
from lowtide.providers.optional import Snapshots, Stops

log = logger.get("lowtide.lifecycle")

T = TypeVar("T")


async def end_lease(
    ledger: Ledger,
    provider: Provider,
    lease: Lease,
    *,
    owner: Owner | None,
    decision: Decision,
    states: Collection[LeaseState] | None = None,
    grace_seconds: float = 0.0,
    deadline_seconds: float = 60.0,
    snapshot_name: str | None = None,
    spec: SandboxSpec | None = None,
    answered: bool = False,
    on_nothing: Callable[[], None] = lambda: None,
) -> EndReport:
    """End `lease` as decided. Never raises for a provider's fault: the report says what happened.

    `owner` and `states` guard the row: when it has another owner by now (adopted), or is in another
    state (kept, released), nothing is touched. Without `states`: those that `lease` was seen in.
    `spec` is the create call where it is still known; what the row remembers of it does otherwise.
    `answered`: the create was refused; `on_nothing` is called while nothing of it shows (see `recover`).
    """
    started = time.monotonic()
    report = EndReport(
        outcome=Outcome.FAILED, sandbox_id=lease.sandbox_id, provider=lease.provider, seconds=0.0
    )

    def done(outcome: Outcome, why: str, **more: object) -> EndReport:
        return replace(report, outcome=outcome, why=why, seconds=time.monotonic() - started, **more)  # type: ignore[arg-type]

    spec = spec or recovery_spec(provider, lease)
    guarded = states if states is not None else OWNED if lease.state in OWNED else {lease.state}
    try:
        async with asyncio.timeout(deadline_seconds):
            if not await is_shown(provider, lease, spec):
                raise another_account(provider, lease)
            if decision.fate is not Fate.DESTROY and lease.sandbox_id is not None:
                kept = await _leave(ledger, provider, lease, owner, guarded, decision)
                if kept is not None:
                    return done(kept, decision.why)
            point("end:before-claim")
            claimed = await ledger.change(
                lease.lease_id,
                LeaseState.ENDING,
                before=guarded,
                owned_by=owner,
                why=decision.why,
                **request_ended(lease),
            )
            if claimed is None:
                return replace(
                    let_be(await ledger.get(lease.lease_id), provider), seconds=time.monotonic() - started
                )
            known, lease = lease.sandbox_id, claimed
            point("end:claimed")
            # The id is in the row, or only in memory yet: the row could not be written when it came.
            sandbox_id = (
                claimed.sandbox_id
                or known
                or await recover(ledger, provider, claimed, spec, answered=answered, on_nothing=on_nothing)
            )
            if sandbox_id is None:
                await ledger.change(
                    lease.lease_id,
                    LeaseState.GONE,
                    before={LeaseState.ENDING},
                    why=f"{provider.name} has nothing of that lease",
                )
                return done(Outcome.ALREADY_GONE, "the provider never made it")
            report = replace(report, sandbox_id=sandbox_id)
            snapshot_id = None
            if snapshot_name is not None and isinstance(provider, Snapshots):
                snapshot_id = await provider.snapshot(sandbox_id, snapshot_name)
            ended_now = await _destroy(provider, sandbox_id, grace_seconds)
            point("end:destroyed")
            why = "destroyed" if ended_now else "was already gone"
            before = frozenset(LeaseState) - {LeaseState.GONE}
            await ledger.change(lease.lease_id, LeaseState.GONE, before=before, why=why)
            point("end:gone")
            log.info("lease %s (%s %s): %s", lease.lease_id, provider.name, sandbox_id, why)
            outcome = Outcome.DESTROYED if ended_now else Outcome.ALREADY_GONE
            return done(outcome, decision.why if ended_now else why, snapshot_id=snapshot_id)
    except Exception as error:  # whatever it is: an SDK that cannot read an answer raises anything
        failure: Exception = error
    # Not done: the row stays, with the count of failures, and is tried again by whoever comes next.
    if isinstance(failure, TimeoutError) and not str(failure):
        text = f"not confirmed within {deadline_seconds:g} s"
        failure = LowtideError(
            f"{provider.name} did not confirm the end of {report.sandbox_id or lease.lease_id} within "
            f"{deadline_seconds:g} s; it stays in the ledger and is tried again (or run: lowtide sweep)",
            provider=provider.name,
            sandbox_id=report.sandbox_id,
            retryable=True,
        )
    else:
        text = _text(failure)
    log.warning("lease %s (%s): ending failed: %s", lease.lease_id, provider.name, text)
    try:
        await ledger.note(
            lease.lease_id,
            f"ending failed: {text}",
            attempts=lease.attempts + 1,
            sandbox_id=report.sandbox_id or lease.sandbox_id,
        )
    except LowtideError as error:
        log.warning("lease %s: %s", lease.lease_id, error)
    return done(Outcome.FAILED, text, error=failure)


async def end_for_another(
    ledger: Ledger,
    provider: Provider,
    lease: Lease,
    *,
    owner: Owner | None,
    decision: Decision,
    deadline_seconds: float,
) -> EndReport:
    """What the guardian and its workers do: `end_lease`; on a full disk the sandbox all the same, its row later.

    The report says FAILED until the row is settled, so that it is tried again.
    """
    report = await end_lease(
        ledger, provider, lease, owner=owner, decision=decision, deadline_seconds=deadline_seconds
    )
    # One that is only busy is left: who writes it may be adopting.
    unwritable = isinstance(report.error, LedgerError) and not report.error.retryable
    if (
        unwritable
        and decision.fate is Fate.DESTROY
        and lease.state in OWNED
        and provider.account == lease.account
    ):
        await end_without_row(
            ledger,
            HeldLease(provider, lease),
            decision,
            grace_seconds=0.0,
            deadline_seconds=deadline_seconds,
            for_another=True,
        )
    return report


async def end_without_row(
    ledger: Ledger,
    held: HeldLease,
    decision: Decision,
    *,
    grace_seconds: float,
    deadline_seconds: float,
    for_another: bool = False,
) -> EndReport:
    """End what this process owns although the ledger cannot be written. The row is settled once it can be.

    What the ledger still shows counts: one that has another owner by now is left. `for_another`: this process
    does not own it, so its row has to be read for it to be touched.
    """
    started = time.monotonic()
    lease, provider = held.lease, held.provider
    report = EndReport(
        outcome=Outcome.FAILED, sandbox_id=lease.sandbox_id, provider=provider.name, seconds=0.0
    )
    try:
        async with asyncio.timeout(deadline_seconds):
            try:
                row = await ledger.get(lease.lease_id)
                if row is not None and not may_claim(row, provider, Claim.OWN, lease.owner):
                    return let_be(row, provider)
            except LedgerError as error:  # not even read: then what this process knows has to do
                if for_another:
                    raise
                log.warning("lease %s: %s", lease.lease_id, error)
            sandbox_id = lease.sandbox_id or await recover(
                ledger, provider, lease, held.spec or recovery_spec(provider, lease), answered=False
            )
            ended = sandbox_id is not None and await _destroy(provider, sandbox_id, grace_seconds)
    except Exception as error:
        why = _text(error) or f"not confirmed within {deadline_seconds:g} s"
        return replace(report, why=why, error=error, seconds=time.monotonic() - started)
    log.warning("lease %s (%s %s): ended without its row", lease.lease_id, provider.name, sandbox_id)
    return replace(
        report,
        outcome=Outcome.DESTROYED if ended else Outcome.ALREADY_GONE,
        sandbox_id=sandbox_id,
        why=decision.why,
        seconds=time.monotonic() - started,
    )


def _text(error: Exception) -> str:
    text = str(error) if isinstance(error, LowtideError | OSError) else f"{type(error).__name__}: {error}"
    return without_secrets(text)


async def _destroy(provider: Provider, sandbox_id: str, grace_seconds: float) -> bool:
    try:
        return await patiently(
            f"destroying {provider.name} {sandbox_id}",
            lambda: provider.destroy(sandbox_id, grace_seconds=grace_seconds),
        )
    except (SandboxNotFoundError, SandboxGone):
        return False


async def _leave(
    ledger: Ledger,
    provider: Provider,
    lease: Lease,
    owner: Owner | None,
    guarded: Collection[LeaseState],
    decision: Decision,
) -> Outcome | None:
    """Keep or stop it. None when it turned out to be gone, so that the normal end settles the row."""
    sandbox_id = lease.sandbox_id
    if sandbox_id is None:
        return None
    until = time.time() + lease.keep_for_seconds
    before = await ledger.get(lease.lease_id)
    try:
        if decision.fate is Fate.STOP and isinstance(provider, Stops):
            await provider.stop_only(sandbox_id, delete_after_seconds=lease.keep_for_seconds)
            lives_until: float | None = until
        else:
            lives_until = await extend_as_allowed(provider, lease, lease.keep_for_seconds)
            if lives_until is None:
                lives_until = lease.expires_at
    except (SandboxNotFoundError, SandboxGone):
        return None
    changed = await ledger.change(
        lease.lease_id,
        LeaseState.KEPT,
        before=guarded,
        owned_by=owner,
        why=decision.why,
        kept_until=until,
        expires_at=lives_until,
    )
    if changed is None:
        return None
    if before is not None and changed.renewed != before.renewed and decision.fate is Fate.KEEP:
        # A renewal came in between, and may have been heard last. One that comes from now on sees that it is kept.
        lives_until = await extend_as_allowed(provider, lease, lease.keep_for_seconds) or lives_until
        await ledger.note(lease.lease_id, "", expires_at=lives_until)
    keep.announce(changed, why=decision.why, until=until, lives_until=lives_until)
    return Outcome.STOPPED if decision.fate is Fate.STOP and isinstance(provider, Stops) else Outcome.KEPT
