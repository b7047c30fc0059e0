"""The guardian: outlives a crashed owner and ends its leases; renews the leases of living ones.

One per user, ledger and pid namespace. It leaves when there is nothing left that it can do; owners
notice and start it again. It holds no truth of its own: everything it decides on is in the ledger, so
it may be killed at any instant and the next one continues. It remembers the rows it has read last, and writes them again
if the ledger is damaged or removed.

It runs from the installation of the owner that started it. If that installation is deleted or replaced, the guardian
exits in favour of a guardian that the next owner with an intact installation starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from lowtide import isolated, machine
from lowtide._version import __version__
from lowtide.errors import AuthenticationError, LowtideError
from lowtide.lifecycle import clock, keep
from lowtide.lifecycle.backoff import Retries
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.deadlines import Deadlines
from lowtide.lifecycle.end import end_for_another
from lowtide.lifecycle.guardian_link import lock_name
from lowtide.lifecycle.guardian_socket import Links
from lowtide.lifecycle.guardian_upkeep import Upkeep
from lowtide.lifecycle.guardian_workers import Credentials, NoCredentials, Start, Workers
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import Lease, LeaseState, Outcome
from lowtide.lifecycle.ledger import OPEN_STATES
from lowtide.lifecycle.owner import RESTARTS, UNPROVEN, Owner, Standing, Verdict
from lowtide.lifecycle.owner_watch import OwnerWatch
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.machine import machine_id

log = logging.getLogger("lowtide.guardian")

IDLE_SECONDS = 1.5
LOOK_SECONDS = 5.0
"""How often the ledger is read for what no message told: owners without a link, expiries, renewals."""
EXEC_SECONDS = (0.0, 0.1, 0.4, 1.5)
"""When to look at an owner whose link closed: in the middle of an exec there is nothing to see yet."""
STAY_SECONDS = 600.0
"""For a kept sandbox that is due within this the guardian stays, even if its provider ends it as well."""
TERM_SECONDS = 20.0
"""A terminated guardian is gone after this, whatever does not answer."""
CLOSE_SECONDS = 5.0
"""Of these, what it has for closing after it has given up what dead owners have left."""
PRECEDENCE_SECONDS = 1.0
"""For the guardian that an owner has linked to, where there are several: others may be able to do less for it."""
GIVE_UP_SECONDS = 86_400.0
"""What has failed for so long does not keep the guardian. The next one, with the next owner, tries again."""
END_SECONDS = 120.0
AT_ONCE = 64


class Guardian:
    """The process's one guardian; runs until nothing is left to do."""

    def __init__(
        self,
        path: Path,
        *,
        descriptors: int = 1024,
        leaves: Callable[[], None] = lambda: None,
        lock: Callable[[], bool] = lambda: True,
    ) -> None:
        """`leaves` is called when it has stopped watching: the next guardian may begin while this one tidies up.

        `lock` makes sure that it is the guardian of the state directory, also of one that was removed and made again;
        False: another one is.
        """
        self.path = path
        self._leaves = leaves
        self._lock = lock
        self.ledger = SqliteLedger(path / "ledger.db")
        self.ledger.replaced = self._ledger_replaced
        self.workers = Workers(path)
        # The rest is for the ledger, for workers and for ending things.
        share = max(4, (descriptors - min(64, descriptors // 2)) // 2)
        self.watch = OwnerWatch(self._owner_died, descriptors=share)
        self.links = Links(
            path,
            share,
            learn=self._learn,
            came=self._look_at,
            worker=self.workers.serve,
            went=self._link_closed,
            status=self._status,
        )
        self.retries = Retries()
        self.deadlines = Deadlines()
        self.upkeep = Upkeep(self.ledger, self.workers, self.retries)
        self.open: list[Lease] = []
        self.ending: dict[str, asyncio.Task[None]] = {}
        self.learned = 0
        """How often owners have told of credentials that were new."""
        self.stuck: set[str] = set()
        """Leases that cannot be ended for want of credentials. They do not keep the guardian."""
        self.failing: dict[str, float] = {}
        """Leases whose end has failed, and since when, on the machine's clock."""
        self.notes: list[str] = []
        """What people should know of, for `lowtide guardian status` and `lowtide doctor`."""
        self.starts: set[Start] = set()
        """Of the owners that are linked."""
        self.came: set[Owner] = set()
        """Those that have come to the socket."""
        self.makes_way = False
        self.rooms: dict[tuple[str, str], asyncio.Semaphore] = {}
        """Per account: a service that does not answer holds up nobody else's sandboxes."""
        self.idle_since: float | None = None
        self.unreadable_since: float | None = None
        self.terminated_at: float | None = None
        self.changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        await self.links.open()
        loop = asyncio.get_running_loop()
        before = signal.signal(signal.SIGTERM, lambda *_: self._on_sigterm(loop))
        try:
            await self._watch()
        finally:
            if self.terminated_at is None:
                signal.signal(signal.SIGTERM, before)

    async def _watch(self) -> None:
        point("guardian:listening")
        log.info("guardian %d watches %s", os.getpid(), self.path)
        gc.collect()
        gc.freeze()
        while await self._look():
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), self._pause())
        point("guardian:leaving")
        self.links.close()
        self._leaves()
        self.watch.close()
        if self.makes_way and self.ending:
            await asyncio.wait(self.ending.values(), timeout=TERM_SECONDS)
        done = not self.makes_way and self.terminated_at is None
        await self.workers.aclose(await self._accounts(), leave=done)
        log.info("guardian %d leaves: %s", os.getpid(), self._why_it_leaves())

    async def _accounts(self) -> list[tuple[str, str]]:
        """All that were ever used here: an owner may be killed before it has told of itself."""
        try:
            return await self.ledger.accounts()
        except LowtideError:
            return []

    def _pause(self) -> float:
        if self.terminated_at is not None:
            return 0.2
        return IDLE_SECONDS if self.idle_since is not None else LOOK_SECONDS

    async def _look(self) -> bool:
        """One look at the ledger. False when it is time to leave."""
        nothing_known = not self.open and not len(self.links)
        if nothing_known and not self._has_ledger():
            log.info("the ledger was removed")
            return False
        if self._has_to_make_way():
            return False
        if self.ledger.damaged:  # seen by a write, while it can still be read
            self._set_ledger_aside()
        try:
            if not self._has_home() and not await self._make_home_again():
                return False
            await self._listen_again_if_removed()
            self.open = await self.ledger.leases()
            verdicts = {owner: self.watch.look(owner) for owner in {lease.owner for lease in self.open}}
            for lease in self.open:
                await self._attend(lease, verdicts[lease.owner])
            self._forget_the_settled()
            await self.upkeep.prune()
        except LowtideError as error:
            if self.retries.due("ledger"):
                log.warning("%s", error)
                self.retries.failed("ledger")
            if self.ledger.damaged:
                self._set_ledger_aside()
            return not self._out_of_time() and not self._gives_ledger_up()
        self.retries.succeeded("ledger")
        self.unreadable_since = None
        if self.terminated_at is not None:
            return await self._goes_on_though_terminated(verdicts)
        if self.ending or len(self.links) or any(self._needed_by(lease, verdicts) for lease in self.open):
            self.idle_since = None
            return True
        now = clock.seconds()
        if self.idle_since is None:
            self.idle_since = now
            await self.upkeep.prune(now=True)
            machine.remove_ended_boots(self.path, {lease.owner.boot_id for lease in self.open})
            return True
        return now - self.idle_since < IDLE_SECONDS

    def _has_home(self) -> bool:
        return os.path.isdir(self.path)  # False, too, for one that is out of reach: `Path.is_dir` would raise

    def _has_ledger(self) -> bool:
        return os.path.exists(self.path / "ledger.db")

    def _gives_ledger_up(self) -> bool:
        """It could not be read for a day and no owner is linked. The next guardian, with the next owner, tries again."""
        if self.unreadable_since is None:
            self.unreadable_since = clock.seconds()
        return not len(self.links) and clock.seconds() - self.unreadable_since > GIVE_UP_SECONDS

    def _needed_by(self, lease: Lease, verdicts: dict[Owner, Verdict]) -> bool:
        """Whether there is something left that this guardian can do for this lease."""
        if lease.lease_id in self.stuck or lease.owner.machine_id != machine_id():
            return False
        since = self.failing.get(lease.lease_id)
        if since is not None and clock.seconds() - since > GIVE_UP_SECONDS:
            return False
        standing = verdicts[lease.owner].standing
        if lease.state is LeaseState.KEPT:
            return self._may_end_kept(lease, standing) and not self._ends_by_itself(lease)
        if standing is Standing.UNKNOWN and not lease.owner.here:
            return False  # in another container: it cannot be seen from here
        if standing in RESTARTS and self.workers.outlives_machine(lease):
            return lease.lifetime_seconds is not None  # else its provider ends it, and nobody renews it
        return standing is not Standing.PERHAPS_RESTARTED

    def _may_end_kept(self, lease: Lease, standing: Standing) -> bool:
        """Whether it can be ended from here: a local one only on its own machine, in its own container."""
        if lease.owner.machine_id != machine_id():
            return False
        return lease.owner.here or standing not in UNPROVEN or self.workers.outlives_machine(lease)

    def _ends_by_itself(self, lease: Lease) -> bool:
        """A kept one that is not due soon and whose provider ends it no later than we would."""
        if lease.kept_until is None or lease.expires_at is None:
            return False
        if self.deadlines.left(lease.lease_id, lease.kept_until) < STAY_SECONDS:
            return False
        return lease.expires_at <= lease.kept_until + 60.0

    def _forget_the_settled(self) -> None:
        known = {lease.lease_id for lease in self.open}
        self.stuck &= known
        self.failing = {one: since for one, since in self.failing.items() if one in known}
        self.starts = {start for start in self.starts if not start.closed}
        owners = {lease.owner for lease in self.open}
        self.watch.only(owners)
        self.came = {owner for owner in self.came if owner in owners or owner in self.links}
        accounts = {(lease.provider, lease.account) for lease in self.open}
        self.rooms = {account: room for account, room in self.rooms.items() if account in accounts}
        self.retries.only(known | {"renew " + one for one in known} | {"ask " + one for one in known})
        self.deadlines.only(known)
        self.upkeep.only(known)
        self.workers.only(accounts)

    # Owners.

    def _look_at(self, owner: Owner) -> None:
        """One that has come to the socket: it owns nothing yet, or a row says so already."""
        self.came.add(owner)
        self.watch.look(owner)

    def _is_anothers(self, owner: Owner) -> bool:
        """Whether another guardian may be nearer to it: one runs, and this one was never addressed."""
        return owner not in self.came and any(
            path.name != lock_name() and machine.is_locked(path) for path in self.path.glob("guardian-*.lock")
        )

    def _owner_died(self, owner: Owner, why: str) -> None:
        point("guardian:owner-died")
        self._in_background(self._end_what_it_left(owner, why))

    async def _end_what_it_left(self, owner: Owner, why: str) -> None:
        leases = [one for one in await self.ledger.leases(owner=owner) if one.state is not LeaseState.KEPT]
        if leases:
            log.info("owner %d left %d leases: %s", owner.pid, len(leases), why)
        for lease in leases:
            self._end(lease, _after_death(lease), owner)
        self.changed.set()

    async def _link_closed(self, owner: Owner) -> None:
        """The first sign of an exec, and no more than that: what replaced the owner proves it, not the link."""
        self.changed.set()
        for pause in EXEC_SECONDS:
            await asyncio.sleep(pause)
            if owner in self.links or owner not in self.watch:
                return
            self.watch.look(owner)

    # Leases.

    async def _attend(self, lease: Lease, verdict: Verdict) -> None:
        """Whatever is due for one lease: an expired keep, a dead owner, a failed end, a lifetime, a renewal."""
        here = verdict.standing is not Standing.UNKNOWN or lease.owner.here
        if lease.state is LeaseState.KEPT:
            due = lease.kept_until is not None and (self.deadlines.left(lease.lease_id, lease.kept_until) < 0)
            if due and self._may_end_kept(lease, verdict.standing):
                self._end(lease, Decision(Fate.DESTROY, "kept until now"), None)
        elif not here:
            return
        elif verdict.standing in RESTARTS and self.workers.outlives_machine(lease):
            if self.upkeep.ask_due(lease):
                self._in_background(self._end_if_not_renewed(lease))
        elif verdict.standing is Standing.PERHAPS_RESTARTED:
            return
        elif verdict.standing in (Standing.DEAD, Standing.RESTARTED):
            self._end(lease, _after_death(lease), lease.owner)
        elif lease.state is LeaseState.ENDING and lease.attempts:
            # The owner lives, but could not end it: it is tried again until it succeeds.
            self._end(lease, Decision(Fate.DESTROY, lease.reason or "its lease ended"), lease.owner)
        elif (left := lease.life_left()) is not None and left < -1.0:
            self._end(lease, Decision(Fate.DESTROY, "its maximum lifetime is over"), lease.owner)
        elif lease.state is LeaseState.LIVE and self.upkeep.renewal_due(lease):
            self._in_background(self.upkeep.renew(lease))

    async def _end_if_not_renewed(self, lease: Lease) -> None:
        """After a restart or in a clone: the provider's own expiry tells whether somebody goes on with it."""
        known = self.learned
        try:
            why = await self.upkeep.abandoned(lease)
        except (NoCredentials, AuthenticationError):
            if self.learned == known:
                self.stuck.add(lease.lease_id)
            return
        except Exception:  # it has said so
            self.failing.setdefault(lease.lease_id, clock.seconds())
            return
        if why is None:
            self.failing.pop(lease.lease_id, None)
        else:
            self._end(lease, Decision(_after_death(lease).fate, why), lease.owner)

    def _end(self, lease: Lease, decision: Decision, owner: Owner | None) -> None:
        if lease.lease_id in self.ending or not self.retries.due(lease.lease_id):
            return
        task = asyncio.ensure_future(self._end_one(lease, decision, owner))
        self.ending[lease.lease_id] = task

        def ended(_: asyncio.Task[None]) -> None:
            self.ending.pop(lease.lease_id, None)
            self.changed.set()

        task.add_done_callback(ended)

    async def _end_one(self, lease: Lease, decision: Decision, owner: Owner | None) -> None:
        known = self.learned
        if owner is not None and self._is_anothers(owner):
            await asyncio.sleep(PRECEDENCE_SECONDS)
        try:
            async with self.rooms.setdefault((lease.provider, lease.account), asyncio.Semaphore(AT_ONCE)):
                outcome, why = await self.workers.with_any_key(
                    lease, lambda account: self._end_with(account, lease, decision, owner)
                )
        except NoCredentials as error:
            if self.learned != known:  # an owner told of some meanwhile: perhaps with its last message
                return
            self.stuck.add(lease.lease_id)
            outcome, why = Outcome.FAILED, str(error)
        except Exception as error:
            outcome, why = Outcome.FAILED, str(error) or type(error).__name__
        again = ""
        if outcome is Outcome.FAILED:
            self.ledger.suspect(why)
            self.failing.setdefault(lease.lease_id, clock.seconds())
            wait = self.retries.failed(lease.lease_id)
            # A moment later, so that it is due by then; else the next look would be the regular one.
            asyncio.get_running_loop().call_later(wait + 0.05, self.changed.set)
            again = f"; tried again in {wait:.0f} s"
        else:
            self.retries.succeeded(lease.lease_id)
            self.stuck.discard(lease.lease_id)
            self.failing.pop(lease.lease_id, None)
        log.info(
            "lease %s (%s %s): %s: %s%s",
            lease.lease_id,
            lease.provider,
            lease.sandbox_id,
            outcome,
            why,
            again,
        )

    async def _end_with(
        self, account: str, lease: Lease, decision: Decision, owner: Owner | None
    ) -> tuple[Outcome, str]:
        provider = self.workers.light(lease, account)
        if provider is None:
            return await self.workers.end(lease, decision, account)
        report = await end_for_another(
            self.ledger, provider, lease, owner=owner, decision=decision, deadline_seconds=END_SECONDS
        )
        if isinstance(report.error, AuthenticationError):
            raise report.error
        return report.outcome, report.why

    # What comes from outside.

    def _learn(self, credentials: Credentials, start: Start) -> None:
        self.starts.add(start)
        if not isolated.intact():
            self.changed.set()
        if not self.workers.learn(credentials, start):
            return
        self.learned += 1
        # What failed without them may work with them: leases of that account, or of another one that has a new key. Those
        # that are stuck may be younger than the last look at the ledger.
        again = {lease.lease_id for lease in self.open if lease.provider == credentials.name} | self.stuck
        for lease_id in again:
            for what in ("", "ask ", "renew "):
                self.retries.succeeded(what + lease_id)
        self.stuck.clear()
        self.changed.set()

    # The installation, the ledger or the whole state directory is taken away.

    def _has_to_make_way(self) -> bool:
        """Whether this guardian's installation is gone and another guardian takes over, or none is needed.

        It can destroy the sandboxes of the owners that it has: their code is loaded. But it cannot load anything new, so
        later owners must not depend on it.
        """
        if isolated.intact():
            return False
        failed = [lease for lease in self.open if lease.lease_id in self.failing]
        if any(start.intact and not start.closed for start in self.starts):
            log.warning(
                "the installation of this guardian was removed or replaced: it makes way for one of an owner's"
            )
        elif failed and len(failed) == len(self.open) and not self.ending and not len(self.links):
            log.warning(
                "the installation of this guardian was removed, and it cannot end %d leases: the next lowtide "
                "process can, or `lowtide sweep`",
                len(failed),
            )
        else:
            return False
        self.makes_way = True
        return True

    def _ledger_replaced(self, unsettled: list[Lease] | None) -> None:
        """The file was removed, or another is in its place: what was open in it is written down again."""
        leases = self.open if unsettled is None else unsettled
        self._note(f"the ledger was removed or replaced: writing {len(leases)} open leases again")
        self._in_background(self.ledger.restore(leases))
        self.links.tell({"ledger": "replaced"})

    def _set_ledger_aside(self) -> None:
        """It is damaged: keep it under another name, and begin a new one with what is known here."""
        try:
            aside = self.ledger.set_aside()
        except LowtideError as error:
            log.warning("%s", error)
            return
        if aside is not None:
            self._note(
                f"the ledger was damaged and is now {aside}; a new one has the leases that the guardian and the owners "
                "remember. Settled leases and their history are only in the old file"
            )
        self.changed.set()

    async def _make_home_again(self) -> bool:
        """The state directory was removed. With nothing left to look after, that is the end of it."""
        unsettled = self.ledger.unsettled()  # of the removed file, which is still open here
        leases = self.open if unsettled is None else unsettled
        verdicts = {lease.owner: lease.owner.verdict() for lease in leases}
        if not any(lease.state in OPEN_STATES and self._needed_by(lease, verdicts) for lease in leases):
            log.info("the state directory was removed")
            return False
        self.open = [lease for lease in leases if lease.state in OPEN_STATES]
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            machine.hold_boot(self.path)
            mine = self._lock()
            self.ledger.follow()
            await asyncio.gather(*self._tasks)  # they write the rows
            if mine:
                await self.links.open()
        except OSError as error:
            log.warning("the state directory %s cannot be made again: %s", self.path, error)
            return not self._out_of_time()
        self._note(f"the state directory was removed: made again with {len(self.open)} open leases")
        return mine  # else another guardian is there, and has the rows now

    async def _listen_again_if_removed(self) -> None:
        """Listen again if the socket was removed: without it no later owner finds this guardian, nor gets another one."""
        if self.links.has_entrance():
            return
        try:
            if self._lock():
                await self.links.open()
                self._note("the guardian's socket was removed: it is made again")
        except OSError as error:
            log.warning("the guardian's socket was removed and cannot be made again: %s", error)

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self.notes = [*self.notes[-19:], text]

    # The end.

    def _on_sigterm(self, loop: asyncio.AbstractEventLoop) -> None:
        """By the interpreter, in whatever it is doing: the kernel's alarm ends what does not come to an end."""
        if self.terminated_at is None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, TERM_SECONDS)
        loop.call_soon_threadsafe(self._terminated)

    def _terminated(self) -> None:
        if self.terminated_at is None:
            log.info("guardian %d was told to end: finishing what dead owners have left", os.getpid())
            self.terminated_at = clock.seconds()
        self.changed.set()

    async def _goes_on_though_terminated(self, verdicts: dict[Owner, Verdict]) -> bool:
        """While there is something of the dead to end. A moment longer, too: often their owners die with us."""
        left = [
            lease
            for lease in self.open
            if verdicts[lease.owner].standing is Standing.DEAD
            and lease.state is not LeaseState.KEPT
            and lease.lease_id not in self.stuck
        ]
        busy = left or self.ending or clock.seconds() - (self.terminated_at or 0.0) < IDLE_SECONDS
        if not busy:
            return False
        if self._out_of_time():
            log.warning("not finished in time: %d leases are left to the next", len(left))
            return False
        return True

    def _out_of_time(self) -> bool:
        return self.terminated_at is not None and (
            clock.seconds() - self.terminated_at > TERM_SECONDS - CLOSE_SECONDS
        )

    def _why_it_leaves(self) -> str:
        if self.makes_way:
            return "its installation is gone"
        if self.terminated_at is not None:
            return "it was told to end; owners that live start another"
        if self.stuck:
            return (
                f"nothing left to watch, and no credentials here for {len(self.stuck)} leases: set them and run "
                "`lowtide sweep`, or use lowtide with them; the next guardian goes on"
            )
        return "nothing left to watch"

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "owners": sorted(owner.pid for owner in self.watch.owners()),
            "ending": sorted(self.ending),
            "version": __version__,
            "installation": isolated.installation(),
            "notes": [*self.notes, *(f"{name}: {why}" for (name, _), why in self.workers.problems.items())],
        }

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        async def carefully() -> None:
            try:
                await work
            except Exception as error:
                log.warning("guardian: %s", error)
                self.changed.set()

        task = asyncio.ensure_future(carefully())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _after_death(lease: Lease) -> Decision:
    # Ended by the owner itself already, only not confirmed: then it did not crash with it in use.
    return keep.decide(lease, failed=lease.state is not LeaseState.ENDING, environ={})
