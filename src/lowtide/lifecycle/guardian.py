"""The guardian: outlives a crashed owner and ends its leases; renews the leases of living ones.

One per user and ledger, held to one by a lock file. It watches owners by pidfd. It leaves when there
is nothing left to watch; owners notice and start it again. It holds no truth of its own: everything
it decides on is in the ledger, so it may be killed at any instant and the next one goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.lifecycle import keep
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.ending import end_lease, extend
from lowtide.lifecycle.guardian_link import SOCKET, DirectoryAddress
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import Lease, LeaseState, Outcome, renewal_seconds
from lowtide.lifecycle.ledger import SqliteLedger
from lowtide.lifecycle.owner import Owner, Standing
from lowtide.lifecycle.points import point
from lowtide.lifecycle.workers import Credentials, Workers
from lowtide.machine import machine_id

log = logging.getLogger("lowtide.guardian")

IDLE_SECONDS = 1.5
LOOK_SECONDS = 5.0
"""How often the ledger is read for what no message told: owners without a link, expiries, renewals."""
EXEC_SECONDS = (0.0, 0.1, 0.4, 1.5)
"""When to look at an owner whose link closed: in the middle of an exec there is nothing to see yet."""
STAY_SECONDS = 600.0
"""For a kept sandbox that is due within this the guardian stays, even if its provider ends it as well."""
AT_ONCE = 64
KEEP_GONE_SECONDS = 7 * 86_400.0


class Guardian:
    """The process's one guardian; runs until nothing is left to watch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = SqliteLedger(path / "ledger.db")
        self.workers = Workers(path)
        self.watched: dict[Owner, int] = {}
        self.dead: set[Owner] = set()
        self.linked: dict[asyncio.StreamWriter, Owner | None] = {}
        self.ending: dict[str, asyncio.Task[None]] = {}
        self.retry_at: dict[str, float] = {}
        self.room = asyncio.Semaphore(AT_ONCE)
        self.idle_since: float | None = None
        self.changed = asyncio.Event()

    async def run(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / SOCKET).unlink()
        with DirectoryAddress(self.path) as address:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            door.bind(address)
        os.chmod(self.path / SOCKET, 0o600)
        door.listen(128)
        server = await asyncio.start_unix_server(self._serve, sock=door)
        point("guardian:listening")
        log.info("guardian %d watches %s", os.getpid(), self.path)
        gc.collect()
        gc.freeze()
        while await self._look():
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), self._pause())
        point("guardian:leaving")
        # Close the door first: an owner that comes now finds nobody and starts a new guardian.
        (self.path / SOCKET).unlink(missing_ok=True)
        server.close()
        for writer in list(self.linked):
            writer.close()
        await self.workers.aclose()
        log.info("guardian %d leaves: nothing left to watch", os.getpid())

    def _pause(self) -> float:
        return IDLE_SECONDS if self.idle_since is not None else LOOK_SECONDS

    async def _look(self) -> bool:
        """One look at the ledger. False when it is time to leave."""
        if not (self.path / "ledger.db").exists():
            log.info("the ledger was removed")
            return False
        try:
            for owner in await self.ledger.owners():
                if owner not in self.dead:
                    await self._watch(owner)
            await self._keep_up()
        except LowtideError as error:
            log.warning("%s", error)
            return True
        if self.watched or self.ending or self.linked or await self._open_leases():
            self.idle_since = None
            return True
        now = time.monotonic()
        if self.idle_since is None:
            self.idle_since = now
            await self.ledger.forget(gone_before=time.time() - KEEP_GONE_SECONDS)
            return True
        return now - self.idle_since < IDLE_SECONDS

    async def _open_leases(self) -> list[Lease]:
        """What is still ours to do later: failed ends until they succeed, kept ones that nobody else ends."""
        return [
            lease
            for lease in await self.ledger.leases()
            if lease.owner.machine_id == machine_id() and not _ends_by_itself(lease)
        ]

    # Owners.

    async def _watch(self, owner: Owner) -> None:
        """Watch a living owner; end what a dead one left."""
        verdict = owner.verdict()
        if verdict.standing in (Standing.DEAD, Standing.RESTARTED):
            self._unwatch(owner)
            await self._owner_died(owner, verdict.why)
            return
        if owner in self.watched or verdict.standing is Standing.UNKNOWN:
            return
        try:
            fd = os.pidfd_open(owner.pid)
        except OSError:  # looked at again with every look at the ledger
            return
        if owner.verdict().standing is not Standing.ALIVE:  # the pid was reused in between
            os.close(fd)
            return
        self.watched[owner] = fd
        asyncio.get_running_loop().add_reader(fd, self._on_pidfd, owner)

    def _on_pidfd(self, owner: Owner) -> None:
        self._unwatch(owner)
        _keep_alive(asyncio.ensure_future(self._owner_died(owner, "it ended")))

    def _unwatch(self, owner: Owner) -> None:
        fd = self.watched.pop(owner, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    async def _owner_died(self, owner: Owner, why: str) -> None:
        point("guardian:owner-died")
        self.dead.add(owner)
        leases = [
            lease for lease in await self.ledger.leases(owner=owner) if lease.state is not LeaseState.KEPT
        ]
        if leases:
            log.info("owner %d left %d leases: %s", owner.pid, len(leases), why)
        for lease in leases:
            # Ended by the owner itself already, only not confirmed: then it did not crash with it in use.
            failed = lease.state is not LeaseState.ENDING
            self._end(lease, keep.decide(lease, failed=failed, environ={}), owner)
        self.changed.set()

    # Leases.

    def _end(self, lease: Lease, decision: Decision, owner: Owner | None) -> None:
        if lease.lease_id in self.ending or self.retry_at.get(lease.lease_id, 0.0) > time.monotonic():
            return
        task = asyncio.ensure_future(self._end_one(lease, decision, owner))
        self.ending[lease.lease_id] = task

        def ended(_: asyncio.Task[None]) -> None:
            self.ending.pop(lease.lease_id, None)
            self.changed.set()

        task.add_done_callback(ended)

    async def _end_one(self, lease: Lease, decision: Decision, owner: Owner | None) -> None:
        try:
            async with self.room:
                provider = self.workers.light(lease)
                if provider is not None:
                    report = await end_lease(
                        self.ledger, provider, lease, owner=owner, decision=decision, deadline_seconds=120.0
                    )
                    outcome, why = report.outcome, report.why
                else:
                    outcome, why = await self.workers.end(lease, decision)
            log.info(
                "lease %s (%s %s): %s: %s", lease.lease_id, lease.provider, lease.sandbox_id, outcome, why
            )
        except Exception as error:
            outcome = Outcome.FAILED
            log.warning("lease %s (%s): %s", lease.lease_id, lease.provider, error)
        if outcome is Outcome.FAILED:
            self.retry_at[lease.lease_id] = time.monotonic() + min(60.0, 2.0 * 2 ** min(lease.attempts, 5))
        else:
            self.retry_at.pop(lease.lease_id, None)

    async def _keep_up(self) -> None:
        """Everything that is due: expired keeps, ends that failed before, lifetimes, renewals."""
        now = time.time()
        for lease in await self.ledger.leases():
            if lease.owner.machine_id != machine_id():
                continue
            alive = lease.owner in self.watched
            if lease.state is LeaseState.KEPT:
                if lease.kept_until is not None and lease.kept_until < now:
                    self._end(lease, Decision(Fate.DESTROY, "kept until now"), None)
            elif lease.owner in self.dead or (not alive and lease.owner.alive() is False):
                failed = lease.state is not LeaseState.ENDING
                self._end(lease, keep.decide(lease, failed=failed, environ={}), lease.owner)
            elif lease.state is LeaseState.ENDING and lease.attempts:
                # The owner lives, but could not end it: it is tried again until it succeeds.
                self._end(lease, Decision(Fate.DESTROY, lease.reason or "its lease ended"), lease.owner)
            elif (left := lease.life_left()) is not None and left < -1.0:
                self._end(lease, Decision(Fate.DESTROY, "its maximum lifetime is over"), lease.owner)
            elif lease.state is LeaseState.LIVE and lease.renewal_due(2 / 3):
                _keep_alive(asyncio.ensure_future(self._renew(lease)))

    async def _renew(self, lease: Lease) -> None:
        if self.retry_at.get("renew " + lease.lease_id, 0.0) > time.monotonic() or lease.sandbox_id is None:
            return
        self.retry_at["renew " + lease.lease_id] = time.monotonic() + (lease.lifetime_seconds or 60.0) / 10
        try:
            provider = self.workers.light(lease)
            if provider is not None:
                asked = Instant.now()
                until = await extend(provider, lease.sandbox_id, renewal_seconds(lease))
                await self.ledger.note(lease.lease_id, "", expires_at=until, renewed=asked)
            else:
                await self.workers.renew(lease)
        except Exception as error:
            log.warning("lease %s (%s): renewal failed: %s", lease.lease_id, lease.provider, error)

    # Links from owners.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _peer_uid(writer) != os.getuid():
            writer.close()
            return
        self.linked[writer] = None
        owner: Owner | None = None
        try:
            while line := await reader.readline():
                message: dict[str, Any] = json.loads(line)
                if "status" in message:
                    writer.write(json.dumps(self._status()).encode() + b"\n")
                    continue
                owner = self.linked[writer] = Owner(**message["owner"])
                for known in message["providers"]:
                    self.workers.learn(Credentials(**known))
                await self._watch(owner)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a link broke: %s", error)
        finally:
            self.linked.pop(writer, None)
            writer.close()
            self.changed.set()
        if owner is not None:
            await self._link_closed(owner)

    async def _link_closed(self, owner: Owner) -> None:
        """The first sign of an exec, and no more than that: what replaced the owner proves it, not the link."""
        for pause in EXEC_SECONDS:
            await asyncio.sleep(pause)
            if owner in self.dead or owner in self.linked.values():
                return
            if owner in await self.ledger.owners():
                await self._watch(owner)

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "owners": sorted(owner.pid for owner in self.watched),
            "ending": sorted(self.ending),
        }


_tasks: set[asyncio.Future[Any]] = set()


def _ends_by_itself(lease: Lease) -> bool:
    """A kept one that is not due soon and whose provider ends it no later than we would."""
    if lease.state is not LeaseState.KEPT or lease.kept_until is None or lease.expires_at is None:
        return False
    if lease.kept_until - time.time() < STAY_SECONDS:
        return False
    return lease.expires_at <= lease.kept_until + 60.0


def _keep_alive(task: asyncio.Future[Any]) -> None:
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", peer)[1])


def main(path: str) -> None:
    """Run as the guardian of that state directory, unless there is one already."""
    point("guardian:started")
    os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        lock = os.open(os.path.join(path, "guardian.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    point("guardian:locked")
    _log_to(Path(path) / "guardian.log")
    try:
        asyncio.run(Guardian(Path(path)).run())
    except FileNotFoundError as error:  # the whole state directory was removed under us
        log.warning("guardian leaves: %s", error)
    except Exception:
        log.exception("guardian failed")
        sys.exit(1)


def _log_to(path: Path) -> None:
    """One line per decision. Starts anew past a megabyte, keeping one old file."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > 1_000_000:
            path.replace(path.with_suffix(".log.1"))
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    root = logging.getLogger("lowtide")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
