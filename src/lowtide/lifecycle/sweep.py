"""Sweep: reconcile the ledger with the providers and end what is proven to be an orphan.

Only two things count as proof: a row of this ledger whose owner is dead (or whose keep or lifetime is
over), or our full label set with this ledger's id on a sandbox whose lease is over. Everything else
is left, and the finding says why. Never by name, never by age alone. A row whose sandbox is not there any
more is settled, whoever's it is.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lowtide import logger
from lowtide.errors import LedgerError
from lowtide.lifecycle import ask_provider, keep
from lowtide.lifecycle.ask_provider import Testimony
from lowtide.lifecycle.end import end_lease
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import Lease, LeaseState, Outcome
from lowtide.lifecycle.ledger import OPEN_STATES, Ledger
from lowtide.lifecycle.owner import RESTARTS, UNPROVEN, Standing
from lowtide.lifecycle.recover import another_account, is_shown
from lowtide.providers.base import LABEL_PREFIX, Labels, Provider, SandboxInfo

log = logger.get("lowtide.sweep")

AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Unseen:
    """Nothing can be told about its owner from here."""

    why: str


class Action(enum.StrEnum):
    ENDED = "ended"
    WOULD_END = "would-end"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the sweep saw and did, for one lease or sandbox."""

    action: Action
    provider: str
    sandbox_id: str | None
    lease_id: str | None
    why: str
    age_seconds: float | None = None
    tags: tuple[str, ...] = ()


async def sweep(
    ledger: Ledger,
    providers: Mapping[str, Provider],
    *,
    tags: Collection[str] = (),
    older_than_seconds: float = 0.0,
    dry_run: bool = False,
    deadline_seconds: float = 120.0,
) -> list[Finding]:
    """End every orphan these providers hold, in parallel, under one deadline. Raises for none of them.

    `tags` and `older_than_seconds` narrow what is looked at; they never widen what may be ended.
    """
    sweeping = _Sweep(ledger, providers, frozenset(tags), older_than_seconds, dry_run, deadline_seconds)
    return await sweeping.run()


@dataclass(slots=True)
class _Sweep:
    ledger: Ledger
    providers: Mapping[str, Provider]
    tags: frozenset[str]
    older_than_seconds: float
    dry_run: bool
    deadline_seconds: float

    async def run(self) -> list[Finding]:
        room = asyncio.Semaphore(AT_ONCE)

        async def bounded(lease: Lease) -> Finding:
            async with room:
                return await self._lease(lease)

        leases = [
            lease for lease in await self.ledger.leases(tags=self.tags) if lease.provider in self.providers
        ]
        findings = list(await asyncio.gather(*(bounded(lease) for lease in leases)))
        known = {(lease.provider, lease.sandbox_id) for lease in leases}
        known |= {(lease.provider, lease.lease_id) for lease in leases}
        for provider in self.providers.values():
            findings += await self._provider(provider, known)
        return findings

    async def _lease(self, lease: Lease) -> Finding:
        """A row of the ledger that is not settled."""
        provider = self.providers[lease.provider]
        verdict = self._verdict(lease, provider)
        if isinstance(verdict, Unseen):
            try:
                async with asyncio.timeout(self.deadline_seconds):
                    return await self._unseen(lease, provider, verdict.why)
            except Exception as error:
                return _finding(
                    Action.LEFT, lease, f"{verdict.why}; its provider could not be asked: {error}"
                )
        if isinstance(verdict, str):
            return _finding(Action.LEFT, lease, verdict)
        try:
            if not await is_shown(provider, lease):
                return _finding(Action.LEFT, lease, str(another_account(provider, lease)))
        except Exception as error:
            return _finding(Action.FAILED, lease, str(error))
        if self.dry_run:
            return _finding(Action.WOULD_END, lease, verdict.why)
        owner = None if lease.state is LeaseState.KEPT else lease.owner
        report = await end_lease(
            self.ledger,
            provider,
            lease,
            owner=owner,
            decision=verdict,
            deadline_seconds=self.deadline_seconds,
        )
        if report.outcome is Outcome.FAILED:
            return _finding(Action.FAILED, lease, report.why)
        if report.outcome in (Outcome.KEPT, Outcome.LEFT):
            return _finding(Action.LEFT, lease, report.why)
        return _finding(Action.ENDED, lease, verdict.why)

    async def _unseen(self, lease: Lease, provider: Provider, why: str) -> Finding:
        """An owner that cannot be seen from here: only the provider can tell, and only that it is over."""
        if provider.account != lease.account:  # that it does not show there proves nothing
            return _finding(Action.LEFT, lease, f"{why}; it was made with another key than the one at hand")
        sighting = await ask_provider.ask(provider, lease)
        if sighting.testimony is Testimony.NOT_THERE:
            gone = "it is not there any more"
            if self.dry_run:
                return _finding(Action.WOULD_END, lease, f"{gone}: its row would be settled")
            await self.ledger.change(
                lease.lease_id, LeaseState.GONE, before=OPEN_STATES, owned_by=lease.owner, why=gone
            )
            return _finding(Action.ENDED, lease, f"{gone}: its row is settled")
        ends = ""
        if sighting.expires_at is not None:
            ends = f"; its provider ends it in {max(0.0, sighting.expires_at - time.time()):.0f} s unless renewed"
        return _finding(Action.LEFT, lease, f"{why}{ends}; or delete it by id: lowtide rm {lease.sandbox_id}")

    def _verdict(self, lease: Lease, provider: Provider) -> Decision | Unseen | str:
        """The decision to end it, or why it is left."""
        now = time.time()
        if now - lease.created_at < self.older_than_seconds:
            return "it is younger than asked for"
        if lease.state is LeaseState.KEPT:
            if lease.kept_until is not None and lease.kept_until > now:
                return f"it is kept for another {lease.kept_until - now:.0f} s"
            verdict = lease.owner.verdict()
            if verdict.standing in UNPROVEN and not (
                lease.owner.same_boot or provider.traits.outlives_machine
            ):
                return Unseen(
                    verdict.why
                )  # a local one runs on its own machine, and cannot be ended from another
            return Decision(Fate.DESTROY, "the time it was kept for is over")
        verdict = lease.owner.verdict()
        if verdict.standing is Standing.UNKNOWN:
            return Unseen(verdict.why)
        if verdict.standing is Standing.PERHAPS_RESTARTED and not provider.traits.outlives_machine:
            return Unseen(verdict.why)
        if verdict.standing in RESTARTS and provider.traits.outlives_machine:
            return Unseen(f"{verdict.why}, or goes on in a copy of it")
        if verdict.standing is Standing.ALIVE:
            return verdict.why
        failed = lease.state is not LeaseState.ENDING
        decision = keep.decide(lease, failed=failed, environ={})
        return Decision(decision.fate, verdict.why if decision.fate is Fate.DESTROY else decision.why)

    async def _provider(self, provider: Provider, known: set[tuple[str, str | None]]) -> list[Finding]:
        """What the provider shows with our mark that no open row explains."""
        findings = []
        try:
            async with asyncio.timeout(self.deadline_seconds):
                labels = {LABEL_PREFIX + f"tag-{tag}": "1" for tag in self.tags}
                async for info in provider.list(labels):
                    marks = Labels.from_dict(info.labels)
                    if marks is None or (provider.name, info.sandbox_id) in known:
                        continue
                    if (provider.name, marks.lease_id) not in known:
                        findings.append(await self._marked(provider, info, marks))
        except Exception as error:
            findings.append(
                Finding(
                    action=Action.FAILED,
                    provider=provider.name,
                    sandbox_id=None,
                    lease_id=None,
                    why=f"its sandboxes could not be listed: {error}",
                )
            )
        return findings

    async def _marked(self, provider: Provider, info: SandboxInfo, marks: Labels) -> Finding:
        def found(action: Action, why: str) -> Finding:
            age = time.time() - info.created_at.timestamp() if info.created_at else None
            return Finding(
                action=action,
                provider=provider.name,
                sandbox_id=info.sandbox_id,
                lease_id=marks.lease_id,
                why=why,
                age_seconds=age,
                tags=marks.tags,
            )

        if marks.ledger_id != self.ledger.ledger_id:
            return found(Action.LEFT, "it was made under another ledger; sweep there, or delete it by id")
        try:
            lease = await self.ledger.get(marks.lease_id)
        except LedgerError as error:
            return found(Action.LEFT, str(error))
        if lease is None:
            return found(
                Action.LEFT, "its lease is not in this ledger any more; delete it by id if it is not needed"
            )
        if lease.state is LeaseState.HANDED_OVER:
            return found(Action.LEFT, "it was released")
        if lease.state is not LeaseState.GONE:
            return found(Action.LEFT, f"its lease is {lease.state}")
        why = "its lease is over, but it is still there"
        if self.dry_run:
            return found(Action.WOULD_END, why)
        try:
            async with asyncio.timeout(self.deadline_seconds):
                ended = await provider.destroy(info.sandbox_id)
        except Exception as error:
            return found(Action.FAILED, str(error) or "no answer in time")
        return found(Action.ENDED, why if ended else "the provider's list was behind: it was already gone")


def _finding(action: Action, lease: Lease, why: str) -> Finding:
    return Finding(
        action=action,
        provider=lease.provider,
        sandbox_id=lease.sandbox_id,
        lease_id=lease.lease_id,
        why=why,
        age_seconds=time.time() - lease.created_at,
        tags=lease.tags,
    )
