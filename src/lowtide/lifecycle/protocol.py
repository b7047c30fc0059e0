"""The lifecycle protocol, as the owner of sandboxes sees it: intend, create, end, adopt, release.

One `Lifecycle` per process and ledger. All its coroutines run on the engine's loop, so its state
needs no lock. What it promises holds whether the call returns, raises, is cancelled or is killed:
the row is written before the provider is asked, and is settled only after the provider confirms.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide import engine
from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    MissingDependencyError,
    RateLimitError,
    RequestTimeoutError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.lifecycle import keep, signals
from lowtide.lifecycle.ending import end_lease, extend
from lowtide.lifecycle.guardian_link import GuardianLink
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import (
    LEASE_SECONDS,
    EndReport,
    Keep,
    Lease,
    LeaseState,
    Outcome,
    new_lease_id,
    renewal_seconds,
)
from lowtide.lifecycle.ledger import OPEN_STATES, Ledger, SqliteLedger
from lowtide.lifecycle.lifetime import lease_seconds, with_lifetime
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.points import point
from lowtide.machine import home
from lowtide.providers.base import Labels, Provider, SandboxInfo, SandboxSpec

log = logging.getLogger("lowtide.lifecycle")

END_SECONDS = 60.0
"""How long one `stop()` may take before it reports a failure; ``LOWTIDE_END_SECONDS`` overrides it."""

EXIT_SECONDS = 30.0
"""The one deadline for everything that ends at exit; `LOWTIDE_EXIT_SECONDS` overrides it."""


@dataclass(slots=True)
class Held:
    """A lease this process owns right now."""

    provider: Provider
    lease: Lease
    spec: SandboxSpec | None = None
    creating: asyncio.Task[SandboxInfo] | None = None
    ending: asyncio.Task[EndReport] | None = None
    report: EndReport | None = None


@dataclass(slots=True)
class Lifecycle:
    """Begins and ends leases for this process. Get it with `lifecycle()`."""

    ledger: Ledger
    path: Path
    owner: Owner = field(default_factory=Owner.current)
    held: dict[str, Held] = field(default_factory=dict)
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
            max_lifetime_at=now + max_lifetime_seconds if max_lifetime_seconds is not None else None,
        )

    async def create(self, provider: Provider, lease: Lease, spec: SandboxSpec) -> SandboxInfo:
        """Write the lease down, then create. Cancelling this, or any fault in it, leaves nothing behind."""
        lease, spec = with_lifetime(provider, keep.switched(lease), spec)
        signals.install(self._end_everything, len(self.held) + 1)
        if self.guardian is not None:
            self.guardian.wanted(provider)
        held = self.held[lease.lease_id] = Held(provider, lease, spec)
        held.creating = asyncio.ensure_future(self._create(held, spec))
        self._look_after()
        try:
            # Shielded: when our caller is cancelled the request is already on its way. It is seen
            # through to its answer, and what it made is destroyed.
            return await asyncio.shield(held.creating)
        except asyncio.CancelledError:
            if held.creating.cancelled():  # not our caller: an end gave the request up
                raise _ended_while_created(provider, lease.lease_id) from None
            self._in_background(self.end(provider, lease.lease_id, grace_seconds=0.0, force=True))
            raise

    async def _create(self, held: Held, spec: SandboxSpec) -> SandboxInfo:
        provider, lease = held.provider, held.lease
        point("create:before-intent")
        try:
            await self.ledger.intend(lease, durable=provider.traits.outlives_machine)
        except BaseException:  # not written down: so the provider is not asked
            self.held.pop(lease.lease_id, None)
            raise
        point("create:intended")
        try:
            info = await provider.create(spec)
        except (ValidationError, AuthenticationError, MissingDependencyError) as error:
            # Refused before anything could be made.
            await self.ledger.change(
                lease.lease_id, LeaseState.GONE, before=OPEN_STATES, why=f"refused: {error}"
            )
            self.held.pop(lease.lease_id, None)
            raise
        except BaseException as error:
            # The answer is lost or says no: either way something may exist. Look, and end it.
            if held.ending is None:
                why = f"create failed: {str(error) or type(error).__name__}"
                held.ending = asyncio.ensure_future(
                    self._end_held(held, Decision(Fate.DESTROY, why), answered=_is_answer(error))
                )
                held.ending.add_done_callback(_look_at_failure)
            raise
        point("create:answered")
        live = await self.ledger.change(
            lease.lease_id,
            LeaseState.LIVE,
            before={LeaseState.INTENDED},
            owned_by=self.owner,
            sandbox_id=info.sandbox_id,
        )
        point("create:live")
        if live is None:
            # Somebody ended the lease while the request was on its way. The loser destroys what it holds.
            held.lease = replace(lease, sandbox_id=info.sandbox_id)
            await self.ledger.note(lease.lease_id, "created after its end", sandbox_id=info.sandbox_id)
            await self._destroy_late(provider, info.sandbox_id)
            raise _ended_while_created(provider, info.sandbox_id)
        held.lease = live
        log.info("lease %s (%s): live as %s", lease.lease_id, provider.name, info.sandbox_id)
        return info

    async def _destroy_late(self, provider: Provider, sandbox_id: str) -> None:
        try:
            await provider.destroy(sandbox_id)
        except LowtideError as error:  # the row is ENDING and is tried again
            log.warning("destroying %s %s: %s", provider.name, sandbox_id, error)

    async def end(
        self,
        provider: Provider,
        lease_id: str,
        *,
        grace_seconds: float = 10.0,
        failed: bool = False,
        snapshot_on_stop: bool = False,
        deadline_seconds: float | None = None,
        force: bool = False,
    ) -> EndReport:
        """End a lease: idempotent, shared by concurrent callers, bounded, silent when already gone.

        `failed` is what `keep="on-failure"` looks at; `force` ends it whatever the keep policy says.
        """
        if deadline_seconds is None:
            deadline_seconds = float(os.environ.get("LOWTIDE_END_SECONDS", END_SECONDS))
        held = self.held.get(lease_id)
        if held is None:
            lease = await self.ledger.get(lease_id)
            if lease is None or lease.state is LeaseState.GONE:
                sandbox_id = lease.sandbox_id if lease else None
                return EndReport(
                    outcome=Outcome.ALREADY_GONE,
                    sandbox_id=sandbox_id,
                    provider=provider.name,
                    seconds=0.0,
                    why="it had already ended",
                )
            held = Held(provider, lease)
        if held.ending is None or (held.ending.done() and _may_try_again(held)):
            decision = (
                Decision(Fate.DESTROY, "ended on request")
                if force or snapshot_on_stop
                else keep.decide(held.lease, failed=failed)
            )
            held.ending = asyncio.ensure_future(
                self._end_held(
                    held,
                    decision,
                    grace_seconds=grace_seconds,
                    deadline_seconds=deadline_seconds,
                    snapshot_name=f"snap-{lease_id}" if snapshot_on_stop else None,
                )
            )
        # Shielded: cancelling one caller must not leave the sandbox half ended for the others.
        return await asyncio.shield(held.ending)

    async def _end_held(
        self,
        held: Held,
        decision: Decision,
        *,
        grace_seconds: float = 0.0,
        deadline_seconds: float = 60.0,
        snapshot_name: str | None = None,
        answered: bool = False,
    ) -> EndReport:
        started = time.monotonic()
        creating = held.creating
        if creating is not None and not creating.done() and creating is not asyncio.current_task():
            await self._stop_creating(held, deadline_seconds / 2)
        owner = held.lease.owner if held.lease.lease_id in self.held else None
        report = await end_lease(
            self.ledger,
            held.provider,
            held.lease,
            owner=owner,
            decision=decision,
            grace_seconds=grace_seconds,
            deadline_seconds=max(1.0, deadline_seconds - (time.monotonic() - started)),
            snapshot_name=snapshot_name,
            spec=held.spec,
            answered=answered,
        )
        held.report = report
        if report.outcome is not Outcome.FAILED:
            self.held.pop(held.lease.lease_id, None)
        return report

    async def _stop_creating(self, held: Held, seconds: float) -> None:
        """See a create that is still on its way through to its answer, or give it up and recover."""
        creating = held.creating
        if creating is None:
            return
        # From here on the creator loses the race for LIVE and destroys what it gets.
        await self.ledger.change(
            held.lease.lease_id,
            LeaseState.ENDING,
            before={LeaseState.INTENDED},
            owned_by=held.lease.owner,
            why="ended while being created",
        )
        await asyncio.wait([creating], timeout=seconds)
        if not creating.done():
            creating.cancel()
            await asyncio.wait([creating], timeout=1.0)
        if creating.done() and not creating.cancelled():
            creating.exception()  # seen: it is our own doing

    async def adopt(self, provider: Provider, sandbox_id: str, *, session: str | None = None) -> Lease:
        """Make this process the owner. In the ledger that is one step: there is always exactly one owner."""
        signals.install(self._end_everything, len(self.held) + 1)
        if self.guardian is not None:
            self.guardian.wanted(provider)
        info = await provider.get(sandbox_id)
        row = await self.ledger.find(provider.name, provider.account, sandbox_id)
        if row is not None and row.state is not LeaseState.GONE:
            if row.lease_id in self.held:
                await self.ledger.note(row.lease_id, "", session=session)
                self.held[row.lease_id].lease = replace(self.held[row.lease_id].lease, session=session)
                return self.held[row.lease_id].lease
            lease = await self.ledger.change(
                row.lease_id,
                LeaseState.LIVE,
                before={LeaseState.LIVE, LeaseState.KEPT, LeaseState.HANDED_OVER},
                owned_by=row.owner,
                why=f"adopted by process {self.owner.pid}",
                **self._as_mine(provider, row, session),
            )
            if lease is None:
                raise SandboxGone(
                    f"sandbox {sandbox_id} is being ended by another process and cannot be adopted",
                    provider=provider.name,
                    sandbox_id=sandbox_id,
                    reason="ended",
                )
        else:
            lease = await self._write_down(provider, info, session)
        held = self.held[lease.lease_id] = Held(provider, lease)
        if lease.lifetime_seconds is not None:
            await self._renew(held)
        self._look_after()
        return lease

    def _as_mine(self, provider: Provider, row: Lease, session: str | None) -> dict[str, Any]:
        return {
            "owner": self.owner,
            "session": session,
            "kept_until": None,
            "lifetime_seconds": row.lifetime_seconds or lease_seconds(provider),
        }

    async def _write_down(self, provider: Provider, info: SandboxInfo, session: str | None) -> Lease:
        """A row for a sandbox this ledger does not know: made elsewhere, or by other means."""
        labels = Labels.from_dict(info.labels)
        lease = replace(
            self.new_lease(provider, tags=labels.tags if labels else (), session=session),
            state=LeaseState.LIVE,
            sandbox_id=info.sandbox_id,
            lifetime_seconds=lease_seconds(provider),
            reason=f"adopted by process {self.owner.pid}; it was not in this ledger",
        )
        await self.ledger.intend(lease)
        return lease

    async def release(self, lease_id: str) -> None:
        """Give it up without ending it: nobody here ends it from now on."""
        held = self.held.get(lease_id)
        lease = await self.ledger.change(
            lease_id,
            LeaseState.HANDED_OVER,
            before={LeaseState.LIVE, LeaseState.KEPT},
            owned_by=held.lease.owner if held else None,
            why=f"released by process {self.owner.pid}",
        )
        if lease is None:
            raise SandboxGone(f"lease {lease_id} has ended or has another owner; it cannot be released")
        self.held.pop(lease_id, None)
        if held is not None and lease.sandbox_id is not None and lease.lifetime_seconds is not None:
            await extend(held.provider, lease.sandbox_id, lease.keep_for_seconds)

    async def destroy(self, provider: Provider, sandbox_id: str) -> bool:
        """Destroy by id, whoever made it: the caller named it. True: ended now; False: was already gone."""
        lease = await self.lease_for(provider, sandbox_id)
        if lease is not None and lease.state is not LeaseState.GONE:
            held = self.held.get(lease.lease_id)
            if held is None:
                # By request of a person, also when another process owns it; that one finds it gone.
                report = await end_lease(
                    self.ledger,
                    provider,
                    lease,
                    owner=None,
                    decision=Decision(Fate.DESTROY, "deleted by id"),
                )
            else:
                report = await self.end(provider, lease.lease_id, grace_seconds=0.0, force=True)
            if report.error is not None:
                raise report.error
            return report.outcome is Outcome.DESTROYED
        try:
            return await provider.destroy(sandbox_id)
        except (SandboxNotFoundError, SandboxGone):
            return False

    async def leases(
        self,
        *,
        states: Collection[LeaseState] | None = None,
        tags: Collection[str] = (),
        provider: str | None = None,
    ) -> list[Lease]:
        return await self.ledger.leases(states=states, tags=tags, provider=provider)

    async def lease_for(self, provider: Provider, sandbox_id: str) -> Lease | None:
        return await self.ledger.find(provider.name, provider.account, sandbox_id)

    # What runs besides: leftovers of this very process, renewal, and the end of everything.

    def _look_after(self) -> None:
        if not self._settled_earlier:
            self._settled_earlier = True
            self._in_background(self._end_what_exec_left())
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.ensure_future(self._renew_while_holding())

    async def _end_what_exec_left(self) -> None:
        """Leases of this process from before its exec. Those of a twin (a subinterpreter) are not ours to end."""
        for lease in await self.ledger.leases():
            if lease.state is LeaseState.KEPT or not lease.owner.replaced_by(self.owner):
                continue
            held = next((h for h in self.held.values() if h.lease.provider == lease.provider), None)
            if held is not None:
                await end_lease(
                    self.ledger,
                    held.provider,
                    lease,
                    owner=lease.owner,
                    decision=keep.decide(lease, failed=True),
                )

    async def _renew_while_holding(self) -> None:
        """The second line: the guardian renews at a third of the lifetime, the owner at half if it did not."""
        while any(held.lease.lifetime_seconds for held in self.held.values()):
            shortest = min(h.lease.lifetime_seconds or LEASE_SECONDS for h in self.held.values())
            await asyncio.sleep(shortest / 8)
            for held in list(self.held.values()):
                if held.lease.sandbox_id is None or held.ending is not None:
                    continue
                row = await self.ledger.get(held.lease.lease_id)
                if row is None or row.state is not LeaseState.LIVE or row.owner != self.owner:
                    continue
                if row.renewal_due(time.time(), 1 / 2):
                    await self._renew(held)

    async def _renew(self, held: Held) -> None:
        lease = held.lease
        if lease.sandbox_id is None or lease.lifetime_seconds is None:
            return
        try:
            until = await extend(held.provider, lease.sandbox_id, renewal_seconds(lease))
        except LowtideError as error:
            log.warning("lease %s (%s): renewal failed: %s", lease.lease_id, held.provider.name, error)
            return
        held.lease = replace(lease, expires_at=until)
        await self.ledger.note(lease.lease_id, "", expires_at=until)

    async def _end_everything(self, *, failed: bool, seconds: float | None = None) -> list[EndReport]:
        """All leases this process holds, in parallel, under one deadline."""
        point("exit:begin")
        if seconds is None:
            seconds = float(os.environ.get("LOWTIDE_EXIT_SECONDS", EXIT_SECONDS))
        reports = await asyncio.gather(
            *(
                self.end(
                    held.provider,
                    held.lease.lease_id,
                    grace_seconds=min(2.0, seconds / 4),
                    failed=failed,
                    deadline_seconds=seconds,
                )
                for held in list(self.held.values())
            ),
            return_exceptions=True,
        )
        if self._background:
            await asyncio.wait(list(self._background), timeout=0.5)
        point("exit:end")
        return [report for report in reports if isinstance(report, EndReport)]

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_look_at_failure)


def _ended_while_created(provider: Provider, what: str) -> SandboxGone:
    return SandboxGone(
        f"sandbox {what} was ended while it was being created",
        provider=provider.name,
        sandbox_id=what,
        reason="ended",
    )


def _is_answer(error: BaseException) -> bool:
    """Whether the provider has said no, so that nothing can appear any more; else the answer is lost."""
    if isinstance(error, RateLimitError):
        return True
    lost = (SandboxUnavailableError, RequestTimeoutError)
    return isinstance(error, LowtideError) and not isinstance(error, lost)


def _look_at_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("lifecycle: %s", task.exception())


def _may_try_again(held: Held) -> bool:
    """After an end that failed, or one that left the sandbox kept, the next end starts anew."""
    return held.report is None or held.report.outcome in (Outcome.FAILED, Outcome.KEPT)


_lifecycle: Lifecycle | None = None


def lifecycle(environ: Mapping[str, str] | None = None) -> Lifecycle:
    """The process's one lifecycle; made on first use, for the ``LOWTIDE_HOME`` of that moment."""
    global _lifecycle
    if _lifecycle is None:
        path = home(environ)
        ledger = SqliteLedger(path / "ledger.db")
        engine.forget_in_child(_forget)
        _lifecycle = Lifecycle(ledger=ledger, path=path, guardian=GuardianLink(path))
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
