"""The leases of this process: begin them, end them, and end all of them when the process leaves.

One `Lifecycle` per process and ledger. All its coroutines run on the engine's loop, so its state
needs no lock. What it promises holds whether the call returns, raises, is cancelled or is killed:
the row is written before the provider is asked, and is settled only after the provider confirms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide import engine, logger, settings, threads
from lowtide.errors import (
    LedgerError,
    SandboxGone,
    SandboxNotFoundError,
)
from lowtide.lifecycle import adopt, create, keep, renew, retry_ends, signals
from lowtide.lifecycle.claim import Claim, let_be, may_claim
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.end import end_lease, end_without_row
from lowtide.lifecycle.guardian_link import GuardianLink
from lowtide.lifecycle.held_lease import HeldLease
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import (
    EndReport,
    Keep,
    Lease,
    LeaseState,
    Outcome,
    new_lease_id,
)
from lowtide.lifecycle.ledger import Ledger
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.provider_lifetime import extend_as_allowed, with_lifetime
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.machine import home
from lowtide.providers.base import Provider, SandboxInfo, SandboxSpec

log = logger.get("lowtide.lifecycle")

_GRACE_SECONDS = 10.0
"""The grace that the time one `stop()` may take (``LOWTIDE_END_SECONDS``) includes."""
_OVERTIME_SECONDS = 1.0
"""For those that keep to the deadline to write down that they have failed."""


@dataclass(slots=True)
class Lifecycle:
    """Begins and ends leases for this process. Get it with `lifecycle()`."""

    ledger: Ledger
    path: Path
    owner: Owner = field(default_factory=Owner.current)
    held: dict[str, HeldLease] = field(default_factory=dict)
    guardian: GuardianLink | None = None
    _settled_earlier: bool = False
    _renewing: asyncio.Task[None] | None = None
    _background: set[asyncio.Task[Any]] = field(default_factory=set)

    def new_lease(
        self,
        provider: Provider,
        *,
        tags: Collection[str] = (),
        session: str | None = None,
        keep: Keep = Keep.NEVER,
        keep_for_seconds: float = 86_400.0,
        max_lifetime_seconds: float | None = None,
    ) -> Lease:
        """A lease that is not written down yet. Its id and labels go into the create call."""
        now = time.time()
        return Lease(
            lease_id=new_lease_id(now),
            provider=provider.name,
            account=provider.account,
            owner=self.owner,
            ledger_id=self.ledger.ledger_id,
            tags=tuple(tags),
            session=session,
            keep=keep,
            keep_for_seconds=keep_for_seconds,
            created_at=now,
            began=Instant.now(),
            max_lifetime_at=now + max_lifetime_seconds if max_lifetime_seconds is not None else None,
        )

    # Beginning.

    async def create(self, provider: Provider, lease: Lease, spec: SandboxSpec) -> SandboxInfo:
        """Write the lease down, then create. Cancelling this, or any fault in it, leaves nothing behind."""
        lease, spec = with_lifetime(provider, keep.switched(lease), spec)
        self.prepare(provider)
        held = self.held[lease.lease_id] = HeldLease(provider, lease, spec)
        creating = held.creating = asyncio.ensure_future(create.create(self, held, spec))
        self.look_after()
        try:
            # Shielded: when our caller is cancelled the request is already on its way. It is seen
            # through to its answer, and what it made is destroyed.
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            if creating.cancelled():  # not our caller: an end gave the request up
                raise create.ended_while_created(provider, lease.lease_id) from None
            self._in_background(self.end(provider, lease.lease_id, grace_seconds=0.0, force=True))
            raise

    def prepare(self, provider: Provider) -> None:
        """Before this process owns anything there: settings, exit hook, signals and guardian."""
        settings.check()
        threads.check_supported(provider.name, provider.traits.own_threads)
        signals.install(self._end_everything, len(self.held) + 1)
        if self.guardian is not None:
            self.guardian.wanted(provider)

    # Ending.

    async def end(
        self,
        provider: Provider,
        lease_id: str,
        *,
        grace_seconds: float = _GRACE_SECONDS,
        failed: bool = False,
        snapshot_on_stop: bool = False,
        deadline_seconds: float | None = None,
        force: bool = False,
        keep_it: bool = False,
        claim: Claim = Claim.OWN,
    ) -> EndReport:
        """End a lease: idempotent, shared by concurrent callers, bounded, silent when already gone.

        `claim` says which leases may be ended at all: any other is left, and the report says whose it is.
        `failed` is what `keep="on-failure"` looks at; `force` ends it whatever the keep policy says,
        `keep_it` keeps it whatever that says.
        """
        if deadline_seconds is None:
            deadline_seconds = settings.seconds(settings.END_SECONDS)
            deadline_seconds += max(0.0, grace_seconds - _GRACE_SECONDS)
        held = self.held.get(lease_id)
        if held is None:
            lease = await self.ledger.get(lease_id)
            if lease is None or not may_claim(lease, provider, claim, self.owner):
                return let_be(lease, provider)
            held = HeldLease(provider, lease)
        elif claim is Claim.UNOWNED:
            claim = Claim.OWN
        if held.ending is None or (held.ending.done() and not held.over):
            if keep_it:
                decision = Decision(Fate.KEEP, "kept on request")
            elif force or snapshot_on_stop:
                decision = Decision(Fate.DESTROY, "ended on request")
            else:
                decision = keep.decide(held.lease, failed=failed)
            self.start_end(
                held,
                decision,
                claim,
                grace_seconds=grace_seconds,
                deadline_seconds=deadline_seconds,
                snapshot_name=f"snap-{lease_id}" if snapshot_on_stop else None,
            )
        assert held.ending is not None
        # Shielded: cancelling one caller must not leave the sandbox half ended for the others.
        return await asyncio.shield(held.ending)

    def start_end(
        self, held: HeldLease, decision: Decision, claim: Claim, **how: Any
    ) -> asyncio.Task[EndReport]:
        """For all who want it ended: they wait for the same."""
        held.ending = asyncio.ensure_future(self.end_held(held, decision, claim, **how))
        held.ending.add_done_callback(_look_at_failure)
        return held.ending

    async def end_held(
        self,
        held: HeldLease,
        decision: Decision,
        claim: Claim,
        *,
        grace_seconds: float = 0.0,
        deadline_seconds: float = 60.0,
        snapshot_name: str | None = None,
        answered: bool = False,
    ) -> EndReport:
        """One attempt. What fails while this process owns it is tried again for as long as it lives."""
        started = time.monotonic()
        creating = held.creating
        if creating is not None and not creating.done():
            await self._stop_creating(held, creating, deadline_seconds / 2)
            if not creating.done() or creating.cancelled() or creating.exception() is not None:
                # The creator has destroyed what it got, or will: a row that says "kept" would be of nothing.
                decision = Decision(Fate.DESTROY, "ended while being created")
        report = await end_lease(
            self.ledger,
            held.provider,
            held.lease,
            owner=None if claim is Claim.ANY else held.lease.owner,
            states=frozenset(LeaseState) - {LeaseState.GONE} if claim is Claim.ANY else None,
            decision=decision,
            grace_seconds=grace_seconds,
            deadline_seconds=max(1.0, deadline_seconds - (time.monotonic() - started)),
            snapshot_name=snapshot_name,
            spec=held.spec,
            answered=answered,
            on_nothing=held.refused.set if answered else lambda: None,
        )
        mine = held.lease.lease_id in self.held
        held.settled = True
        if mine and isinstance(report.error, LedgerError) and decision.fate is Fate.DESTROY:
            report = await end_without_row(
                self.ledger, held, decision, grace_seconds=grace_seconds, deadline_seconds=deadline_seconds
            )
            held.settled = False
        held.report = report
        if held.over:
            self.held.pop(held.lease.lease_id, None)
        elif mine:
            self._in_background(retry_ends.until_over(self, held, decision))
        return report

    async def _stop_creating(
        self, held: HeldLease, creating: asyncio.Task[SandboxInfo], seconds: float
    ) -> None:
        """See a create that is still on its way through to its answer, or give it up and recover."""
        # From here on the creator loses the race for LIVE and destroys what it gets.
        try:
            await self.ledger.change(
                held.lease.lease_id,
                LeaseState.ENDING,
                before={LeaseState.INTENDED},
                owned_by=held.lease.owner,
                why="ended while being created",
            )
        except LedgerError as error:  # then it wins, and is ended by its id
            log.warning("lease %s: %s", held.lease.lease_id, error)
        await asyncio.wait([creating], timeout=seconds)
        if not creating.done():
            creating.cancel()
            await asyncio.wait([creating], timeout=1.0)
        if creating.done() and not creating.cancelled():
            creating.exception()  # seen: it is our own doing

    async def destroy(self, provider: Provider, sandbox_id: str) -> bool:
        """Destroy by id, whoever made it: the caller named it. True: ended now; False: was already gone."""
        lease = await self.lease_for(provider, sandbox_id)
        if lease is not None and lease.state is not LeaseState.GONE:
            # By request of a person, also when another process owns it; that one finds it gone.
            report = await self.end(provider, lease.lease_id, grace_seconds=0.0, force=True, claim=Claim.ANY)
            if report.error is not None:
                raise report.error
            return report.outcome is Outcome.DESTROYED
        try:
            return await provider.destroy(sandbox_id)
        except (SandboxNotFoundError, SandboxGone):
            return False

    # Handing over.

    async def adopt(
        self, provider: Provider, sandbox_id: str, *, session: str | None = None, take: bool = False
    ) -> Lease:
        """Make this process the owner of what has none; with `take` also of what has one. See `adopt`."""
        return await adopt.adopt(self, provider, sandbox_id, session=session, take=take)

    async def release(self, lease_id: str) -> None:
        """Give it up without ending it: nobody here ends it from now on."""
        held = self.held.get(lease_id)
        lease = await self.ledger.change(
            lease_id,
            LeaseState.HANDED_OVER,
            before={LeaseState.LIVE},
            owned_by=self.owner,
            why=f"released by process {self.owner.pid}",
        )
        if lease is None:
            raise SandboxGone(f"lease {lease_id} has ended or has another owner; it cannot be released")
        self.held.pop(lease_id, None)
        if held is not None and lease.sandbox_id is not None and lease.lifetime_seconds is not None:
            await extend_as_allowed(held.provider, lease, lease.keep_for_seconds)

    # Reading.

    async def leases(
        self,
        *,
        states: Collection[LeaseState] | None = None,
        tags: Collection[str] = (),
        provider: str | None = None,
    ) -> list[Lease]:
        return await self.ledger.leases(states=states, tags=tags, provider=provider)

    async def lease_for(self, provider: Provider, sandbox_id: str) -> Lease | None:
        """Its row; one that was written under another key, where this account has none."""
        lease = await self.ledger.find(provider.name, provider.account, sandbox_id)
        return lease or await self.ledger.find(provider.name, None, sandbox_id)

    # What runs besides: leftovers of this very process, renewal, and the end of everything.

    def look_after(self) -> None:
        """What is held from now on is renewed, and let go of when it gets another owner."""
        if not self._settled_earlier:
            self._settled_earlier = True
            self._in_background(retry_ends.what_exec_left(self))
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.ensure_future(renew.while_holding(self))

    def write_again(self, unsettled: list[Lease] | None) -> None:
        """The ledger was removed or replaced: what was open in it is in it again."""
        log.warning("the ledger %s was removed or replaced; open leases are written again", self.path)
        if unsettled is None:
            unsettled = [held.lease for held in self.held.values()]
        self._in_background(self.ledger.restore(unsettled))

    async def _end_everything(self, *, failed: bool, seconds: float | None = None) -> list[EndReport]:
        """All leases this process holds, in parallel, under one deadline."""
        point("exit:begin")
        if seconds is None:
            seconds = settings.seconds_at_exit()
        ends = {
            asyncio.ensure_future(
                _unless_refused(
                    held,
                    self.end(
                        held.provider,
                        held.lease.lease_id,
                        grace_seconds=min(2.0, seconds / 4),
                        failed=failed,
                        deadline_seconds=seconds,
                    ),
                )
            ): held
            for held in list(self.held.values())
        }
        if ends:
            # Each keeps to the deadline by itself, but one that was under way before has its own, a later one.
            await asyncio.wait(ends, timeout=seconds + _OVERTIME_SECONDS)
        reports = []
        for end, held in ends.items():
            end.add_done_callback(_look_at_failure)
            if not end.done():
                reports.append(_unfinished(held, seconds))
            elif not end.cancelled() and end.exception() is None and (report := end.result()) is not None:
                reports.append(report)
        if self._background:
            await asyncio.wait(list(self._background), timeout=0.5)
        point("exit:end")
        return reports

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_look_at_failure)


async def _unless_refused(held: HeldLease, end: Coroutine[Any, Any, EndReport]) -> EndReport | None:
    """The report of `end`. None for a create that was refused and of which nothing shows: its row is on disk, and the
    guardian waits for the create window in place of a process that leaves."""
    ending = asyncio.ensure_future(end)
    refused = asyncio.ensure_future(held.refused.wait())
    try:
        await asyncio.wait({ending, refused}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        refused.cancel()
    if not ending.done():
        ending.add_done_callback(_look_at_failure)
        return None
    return ending.result()


def _unfinished(held: HeldLease, seconds: float) -> EndReport:
    """Of an end that goes on when the process leaves: its row is on disk, and the guardian does the rest."""
    return EndReport(
        outcome=Outcome.FAILED,
        sandbox_id=held.lease.sandbox_id,
        provider=held.provider.name,
        seconds=seconds,
        why=f"not confirmed within {seconds:g} s",
    )


def _look_at_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("lifecycle: %s", task.exception())


_lifecycle: Lifecycle | None = None


def lifecycle(environ: Mapping[str, str] | None = None) -> Lifecycle:
    """The process's one lifecycle; made on first use, for the ``LOWTIDE_HOME`` of that moment."""
    global _lifecycle
    if _lifecycle is None:
        path = home(environ)
        ledger = SqliteLedger(path / "ledger.db")
        engine.forget_in_child(_forget)
        _lifecycle = Lifecycle(ledger=ledger, path=path, guardian=GuardianLink(path, ledger.follow))
        ledger.replaced = _lifecycle.write_again
    return _lifecycle


def _forget() -> None:
    """In a forked child: it owns nothing, and must not touch what its parent holds."""
    global _lifecycle
    held, _lifecycle = _lifecycle, None
    signals.forget()
    if held is not None:
        held.held.clear()
        if held.guardian is not None:
            held.guardian.forget()
