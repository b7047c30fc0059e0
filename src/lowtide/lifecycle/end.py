"""Ending one lease: the same steps whoever does it, the owner, the guardian or a sweep.

claim the row (ENDING) -> find what a lost create may have made -> destroy -> confirm (GONE).
The claim compares the owner and the state and sets them in one step: what has got another owner, or is
kept or released, is left. A row only becomes GONE after the provider has confirmed; every failure
leaves it where it is.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from lowtide.errors import (
    AuthenticationError,
    LedgerError,
    LowtideError,
    RateLimitError,
    SandboxGone,
    SandboxNotFoundError,
    ValidationError,
)
from lowtide.lifecycle import keep
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import LEASE_SECONDS, EndReport, Lease, LeaseState, Outcome, renewal_seconds
from lowtide.lifecycle.ledger import Ledger
from lowtide.lifecycle.owner import Owner, Standing
from lowtide.providers.base import Labels, Provider, Renews, Replays, SandboxSpec, Snapshots, Stops

log = logging.getLogger("lowtide.lifecycle")

T = TypeVar("T")

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
) -> EndReport:
    """End `lease` as decided. Never raises for a provider's fault: the report says what happened.

    `owner` and `states` guard the row: when it has another owner by now (adopted), or is in another
    state (kept, released), nothing is touched. Without `states`: those that `lease` was seen in.
    `spec` is the create call where it is still known; what the row remembers of it does otherwise.
    `answered`: the provider has refused the create, so one empty look-up is proof.
    """
    started = time.monotonic()
    report = EndReport(
        outcome=Outcome.FAILED, sandbox_id=lease.sandbox_id, provider=lease.provider, seconds=0.0
    )

    def done(outcome: Outcome, why: str, **more: object) -> EndReport:
        return replace(report, outcome=outcome, why=why, seconds=time.monotonic() - started, **more)  # type: ignore[arg-type]

    spec = spec or recovery_spec(lease)
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
                **_request_ended(lease),
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
                or await _recover(ledger, provider, claimed, spec, answered=answered)
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


async def is_shown(provider: Provider, lease: Lease, spec: SandboxSpec | None = None) -> bool:
    """Whether the account at hand is the lease's, although its key may have been exchanged meanwhile.

    The same fingerprint is. With another one the proof is the sandbox itself: it shows there, with the
    lease's own labels. That it does not show proves nothing, so then nothing is settled.
    """
    if provider.account == lease.account:
        return True
    shown = await _patiently(
        f"looking for {lease.lease_id} with another key",
        lambda: provider.find(spec or recovery_spec(lease)),
    )
    labels = Labels.from_dict(shown.labels) if shown is not None else None
    return labels is not None and (labels.lease_id, labels.ledger_id) == (lease.lease_id, lease.ledger_id)


def another_account(provider: Provider, lease: Lease) -> AuthenticationError:
    return AuthenticationError(
        f"{lease.sandbox_id or lease.lease_id} was made with another {provider.name} key, and the one at hand does not "
        "show it: it has ended, or belongs to another account. Set the key it was made with and run: lowtide sweep",
        provider=provider.name,
        sandbox_id=lease.sandbox_id,
    )


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
            sandbox_id = lease.sandbox_id or await _recover(
                ledger, provider, lease, held.spec or recovery_spec(lease), answered=False
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
    return str(error) if isinstance(error, LowtideError | OSError) else f"{type(error).__name__}: {error}"


def _request_ended(lease: Lease) -> dict[str, Instant]:
    """For a create whose answer is not known: when its request ended, or that it has by now."""
    if lease.sandbox_id is not None:
        return {}
    known = lease.request_ended
    return {"request_ended": known if known is not None and known.elapsed() is not None else Instant.now()}


async def _recover(
    ledger: Ledger, provider: Provider, lease: Lease, spec: SandboxSpec, *, answered: bool
) -> str | None:
    """The id of what a create with a lost answer made; None once it has surely made nothing.

    What was asked for may appear for as long as the create window after the request has ended, unless the
    provider can take the request's key: then it shows at once, or cannot appear at all.
    """
    delay = 0.05
    ended = _request_ended(lease).get("request_ended") or Instant.now()
    while True:
        found = await _patiently(f"looking for {lease.lease_id}", lambda: provider.find(spec))
        if found is None and not answered and isinstance(provider, Replays):
            point("recover:replay")
            found = await _patiently(f"replaying {lease.lease_id}", lambda: provider.replay(spec))
            point("recover:replayed")
        if found is not None:
            try:
                await ledger.note(
                    lease.lease_id, f"found {found.sandbox_id} again", sandbox_id=found.sandbox_id
                )
            except LedgerError as error:  # it is known here, and that is enough to end it
                log.warning("lease %s: %s", lease.lease_id, error)
            return found.sandbox_id
        if answered:
            return None
        left = _create_window_seconds(provider) - (ended.elapsed() or 0.0)
        if left <= 0:
            return None
        await asyncio.sleep(min(delay, left + 0.01))
        delay = min(delay * 1.6, 5.0)


def _create_window_seconds(provider: Provider) -> float:
    """The provider's own, or LOWTIDE_CREATE_WINDOW_SECONDS where that is shorter: for tests on one machine."""
    window = provider.traits.create_window_seconds
    try:
        return min(window, float(os.environ["LOWTIDE_CREATE_WINDOW_SECONDS"]))
    except (KeyError, ValueError):
        return window


async def _destroy(provider: Provider, sandbox_id: str, grace_seconds: float) -> bool:
    try:
        return await _patiently(
            f"destroying {provider.name} {sandbox_id}",
            lambda: provider.destroy(sandbox_id, grace_seconds=grace_seconds),
        )
    except (SandboxNotFoundError, SandboxGone):
        return False


async def _patiently(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Call it, again while the fault may pass. The caller's deadline bounds it."""
    delay = 0.1
    while True:
        try:
            return await call()
        except LowtideError as error:
            if not error.retryable:
                raise
            wait = delay
            if isinstance(error, RateLimitError) and error.retry_after_seconds is not None:
                wait = max(delay, error.retry_after_seconds)
            log.info("%s: %s; trying again in %.1f s", what, error, wait)
        await asyncio.sleep(wait)
        delay = min(delay * 2, 5.0)


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


def recovery_spec(lease: Lease) -> SandboxSpec:
    """Enough of the create call to find what it made; for a replaying provider also to replay it."""
    known = dict(lease.recovery)
    return SandboxSpec(
        labels=lease.labels,
        image=known.get("image"),
        snapshot=known.get("snapshot"),
        lifetime_seconds=lease.lifetime_seconds,
    )
