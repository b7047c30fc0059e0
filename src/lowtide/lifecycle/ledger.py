"""The ledger: the durable record of leases. A small interface, and its SQLite implementation.

Every change of state is a compare-and-set, written together with a line of history in one
transaction. A row is never deleted before its sandbox is confirmed gone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lowtide.errors import LedgerError
from lowtide.lifecycle import lease_rows
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.owner import Owner

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("lowtide.lifecycle")

T = TypeVar("T")

OPEN_STATES = frozenset(LeaseState) - {LeaseState.GONE, LeaseState.HANDED_OVER}
"""The states in which somebody here still has to end something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One change in the life of a lease."""

    at: float
    before: LeaseState | None
    after: LeaseState
    pid: int
    why: str


class Ledger(Protocol):
    """What the lifecycle needs from a ledger. A PostgreSQL one for a fleet fits here."""

    @property
    def ledger_id(self) -> str:
        """Marks every sandbox made under this ledger."""
        ...

    async def intend(self, lease: Lease, *, durable: bool = True) -> None:
        """Write a new row. On return it survives a crash of this process and, if `durable`, a power cut."""
        ...

    async def change(
        self,
        lease_id: str,
        after: LeaseState,
        *,
        before: Collection[LeaseState],
        owned_by: Owner | None = None,
        why: str = "",
        **fields: Any,
    ) -> Lease | None:
        """Compare and set: the changed row, or None when its state or owner was another."""
        ...

    async def note(self, lease_id: str, why: str, **fields: Any) -> None:
        """Change fields without changing the state."""
        ...

    async def get(self, lease_id: str) -> Lease | None: ...

    async def find(self, provider: str | None, account: str | None, sandbox_id: str) -> Lease | None:
        """The newest row of that sandbox; None stands for any provider, any account."""
        ...

    async def named(self, text: str, *, ended: bool, provider: str | None = None) -> list[Lease]:
        """The rows with that sandbox or lease id, oldest first; if there are none, a few of those whose id begins or
        ends so. Either of the open ones or of the `ended`, of which only the newest are searched for an ending."""
        ...

    async def leases(
        self,
        *,
        states: Collection[LeaseState] | None = None,
        owner: Owner | None = None,
        provider: str | None = None,
        tags: Collection[str] = (),
        newest: int | None = None,
    ) -> list[Lease]:
        """Oldest first. With `newest`, at most so many, and those the youngest."""
        ...

    async def owners(self) -> list[Owner]:
        """Who still owns something that has to be ended, on whichever machine."""
        ...

    async def accounts(self) -> list[tuple[str, str]]:
        """Every provider and account that a row is for, settled ones too."""
        ...

    async def history(self, lease_id: str) -> list[HistoryLine]: ...

    async def restore(self, leases: Iterable[Lease]) -> None:
        """Write these rows again where they are missing: the file was removed or replaced."""
        ...

    async def forget(self, *, gone_before: float) -> int:
        """Drop rows that were gone before that time. Returns how many."""
        ...

    def close(self) -> None: ...


_A_FEW = 4
"""Of the rows that an id could mean: enough to say which, or that it is not clear."""
_SEARCHED = 1000
"""How many of the newest rows are searched for the end of an id, for which there is no index."""

_FULL, _NORMAL = "PRAGMA synchronous=FULL", "PRAGMA synchronous=NORMAL"


class SqliteLedger:
    """One file, many processes. Used from one event loop; never blocks it while another process writes."""

    busy_seconds = 30.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._damaged: set[Any] = set()
        self._intended: list[tuple[Lease, asyncio.Future[None]]] = []
        self._intending: asyncio.Task[None] | None = None
        self.replaced: Callable[[list[Lease] | None], None] = lambda _: None
        """Called when somebody has removed the file or put another in its place, once the new one is open: with
        what was not settled in the old one, which is still there for whoever has it open; None if it is damaged."""
        self.ledger_id = self._open(secrets.token_hex(8))

    def _open(self, new_id: str) -> str:
        try:
            _make_if_missing(self.path)
            self._db = sqlite3.connect(self.path, timeout=0.02, isolation_level=None, check_same_thread=False)
            os.chmod(self.path, 0o600)
            ledger_id = self._set_up(new_id)
            self._file = _file(self.path)
        except sqlite3.Error as error:
            raise self._error("open", error) from error
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {self.path}: {error.strerror}") from error
        return ledger_id

    def follow(self) -> None:
        """Open what is at our path now, where that is another file than ours. One that is new keeps our id."""
        if _file(self.path) == self._file or os.getpid() != self._pid:
            return
        # Never closed: SQLite would remove the log of the new file, which has the same name.
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))
        unsettled = self._unsettled()
        self.ledger_id = self._open(self.ledger_id)
        self.replaced(unsettled)

    def _unsettled(self) -> list[Lease] | None:
        """What the file says last. Who kept, released or adopted what is known there better than in any memory."""
        try:
            rows = self._db.execute(f"{lease_rows.SELECT} WHERE state!='gone'").fetchall()
        except sqlite3.Error:
            return None
        return self._readable(rows)

    def _set_up(self, new_id: str) -> str:
        deadline = time.monotonic() + self.busy_seconds
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute(_NORMAL)
                found = self._db.execute("SELECT name FROM sqlite_master WHERE name='meta'").fetchone()
                if not found:
                    self._db.execute("BEGIN IMMEDIATE")
                    for statement in lease_rows.SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute("INSERT OR IGNORE INTO meta VALUES ('ledger_id', ?)", (new_id,))
                    self._db.execute(
                        "INSERT OR IGNORE INTO meta VALUES ('version', ?)", (lease_rows.VERSION,)
                    )
                    self._db.execute("COMMIT")
                meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
                if meta.get("version") in lease_rows.UPGRADES:
                    self._upgrade()
                    continue
                if "ledger_id" in meta:
                    break
            except sqlite3.OperationalError as error:
                self._roll_back()
                if not _busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.005)
        if meta["version"] != lease_rows.VERSION:
            raise LedgerError(
                f"the ledger {self.path} was written by another version of lowtide (format {meta['version']}, "
                f"this one reads {lease_rows.VERSION}); use that version, or another LOWTIDE_HOME"
            )
        return str(meta["ledger_id"])

    def _upgrade(self) -> None:
        """From an earlier version's tables. Rows and ids stay; processes of that version go on using it."""
        self._db.execute("BEGIN IMMEDIATE")
        (version,) = self._db.execute("SELECT value FROM meta WHERE key='version'").fetchone()
        for statement in lease_rows.UPGRADES.get(version, ()):  # none: another process was first
            self._db.execute(statement)
        self._db.execute("UPDATE meta SET value=? WHERE key='version'", (lease_rows.VERSION,))
        self._db.execute("COMMIT")

    async def intend(self, lease: Lease, *, durable: bool = True) -> None:
        if not durable:
            await self._write(lambda: self._insert(lease))
            return
        # What comes in the same moment goes to the disk together: the wait for it is per write, not per row.
        import asyncio

        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._intended.append((lease, written))
        if self._intending is None or self._intending.done() or self._intending.get_loop() is not loop:
            self._intending = loop.create_task(self._write_intended())
        await written

    async def _write_intended(self) -> None:
        while self._intended:
            batch, self._intended = self._intended, []
            try:
                await self._write_together(batch)
            except LedgerError as error:
                for one in batch:  # one that cannot be written is no reason not to write the others
                    try:
                        if len(batch) == 1 or error.retryable:
                            raise error
                        await self._write_together([one])
                    except LedgerError as problem:
                        if not one[1].done():
                            one[1].set_exception(problem)
            except BaseException:
                for _, written in batch:
                    written.cancel()
                raise

    async def _write_together(self, batch: list[tuple[Lease, asyncio.Future[None]]]) -> None:
        def work() -> None:
            for lease, written in batch:
                if not written.done():  # else it was given up
                    self._insert(lease)

        await self._write(work, durable=True)
        for _, written in batch:
            if not written.done():
                written.set_result(None)

    async def change(
        self,
        lease_id: str,
        after: LeaseState,
        *,
        before: Collection[LeaseState],
        owned_by: Owner | None = None,
        why: str = "",
        **fields: Any,
    ) -> Lease | None:
        def work() -> Lease | None:
            lease = self._get(lease_id)
            if (
                lease is None
                or lease.state not in before
                or (owned_by is not None and lease.owner != owned_by)
            ):
                return None
            changed = self._put(lease, state=after, reason=why or lease.reason, **fields)
            if after is not lease.state or why:
                self._remember(lease_id, lease.state, after, why)
            return changed

        return await self._write(work)

    async def note(self, lease_id: str, why: str, **fields: Any) -> None:
        def work() -> None:
            lease = self._get(lease_id)
            if lease is not None:
                self._put(lease, reason=why or lease.reason, **fields)
                if why and why != lease.reason:  # what is only said again is no news, however often
                    self._remember(lease_id, lease.state, lease.state, why)

        await self._write(work)

    async def get(self, lease_id: str) -> Lease | None:
        return await self._retry("read", lambda: self._get(lease_id))

    async def find(self, provider: str | None, account: str | None, sandbox_id: str) -> Lease | None:
        query, values = f"{lease_rows.SELECT} WHERE sandbox_id=?", [sandbox_id]
        if provider is not None:
            query, values = query + " AND provider=?", [*values, provider]
        if account is not None:
            query, values = query + " AND account=?", [*values, account]
        rows = await self._retry("read", lambda: self._db.execute(query, values).fetchall())
        leases = sorted(self._readable(rows), key=lambda lease: lease.created_at)
        return leases[-1] if leases else None

    async def leases(
        self,
        *,
        states: Collection[LeaseState] | None = None,
        owner: Owner | None = None,
        provider: str | None = None,
        tags: Collection[str] = (),
        newest: int | None = None,
    ) -> list[Lease]:
        where, values = _in("state", OPEN_STATES if states is None else states)
        if frozenset(states or ()) == frozenset(LeaseState):
            where, values = "1", []  # then the rows in their own order are the quickest way
        for tag in tags:
            where, values = where + " AND instr(tags, ?)", [*values, json.dumps(tag)]
        if owner is not None:
            where, values = where + " AND pid=? AND start_time=?", [*values, owner.pid, owner.start_time]
        if provider is not None:
            where, values = where + " AND provider=?", [*values, provider]
        query = f"{lease_rows.SELECT} WHERE {where} ORDER BY lease_id DESC LIMIT ?"
        values.append(-1 if newest is None else newest)
        leases = [lease for lease in await self._read(query, values) if owner in (None, lease.owner)]
        return list(reversed(leases))

    async def named(self, text: str, *, ended: bool, provider: str | None = None) -> list[Lease]:
        states, values = _in("state", [LeaseState.GONE] if ended else set(LeaseState) - {LeaseState.GONE})
        if provider is not None:
            states, values = states + " AND provider=?", [*values, provider]
        ids = ("lease_id", "sandbox_id")
        # "+" keeps an index on the state, which most rows share, from being preferred to one on the id.
        by_id = f"{lease_rows.SELECT} WHERE {{id}} AND +{states}"
        found: list[Lease] = []
        for id_ in ids:
            found += await self._read(by_id.format(id=f"{id_}=?"), [text, *values])
        if not found:
            for id_ in ids:
                begins = by_id.format(id=f"{id_}>=? AND {id_}<?") + f" LIMIT {_A_FEW}"
                found += await self._read(begins, [text, text + "\U0010ffff", *values])
            newest = f"{lease_rows.SELECT} WHERE {states} ORDER BY lease_id DESC LIMIT {_SEARCHED}"
            found += [
                lease
                for lease in await self._read(newest, values)
                if any(one is not None and one.endswith(text) for one in (lease.lease_id, lease.sandbox_id))
            ]
        return sorted({lease.lease_id: lease for lease in found}.values(), key=lambda lease: lease.lease_id)

    async def owners(self) -> list[Owner]:
        where, values = _in("state", OPEN_STATES)
        query = f"SELECT DISTINCT {lease_rows.OWNER_COLUMNS} FROM lease WHERE {where}"
        rows = await self._retry("read", lambda: self._db.execute(query, values).fetchall())
        return [lease_rows.to_owner(row) for row in rows]

    async def accounts(self) -> list[tuple[str, str]]:
        query = "SELECT DISTINCT provider, account FROM lease"
        rows = await self._retry("read", lambda: self._db.execute(query).fetchall())
        return [(provider, account) for provider, account in rows]

    async def history(self, lease_id: str) -> list[HistoryLine]:
        query = "SELECT at, before, after, pid, why FROM history WHERE lease_id=? ORDER BY rowid"
        rows = await self._retry("read", lambda: self._db.execute(query, (lease_id,)).fetchall())
        return [
            HistoryLine(
                at=at,
                before=LeaseState(before) if before else None,
                after=LeaseState(after),
                pid=pid,
                why=why,
            )
            for at, before, after, pid, why in rows
        ]

    async def restore(self, leases: Iterable[Lease]) -> None:
        def work() -> None:
            for lease in leases:
                if self._get(lease.lease_id) is None:
                    self._db.execute(lease_rows.INSERT, lease_rows.to_row(lease))
                    self._remember(
                        lease.lease_id, None, lease.state, "written again: the ledger was replaced"
                    )

        await self._write(work, durable=True)

    async def checkpoint(self) -> None:
        """Write the log back into the file and empty it, as far as nobody reads it now."""
        await self._retry("write", lambda: self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())

    async def forget(self, *, gone_before: float) -> int:
        def work() -> int:
            old = [
                row[0]
                for row in self._db.execute(
                    "SELECT lease_id FROM lease WHERE state='gone' AND changed_at < ?", (gone_before,)
                )
            ]
            self._db.executemany("DELETE FROM history WHERE lease_id=?", [(i,) for i in old])
            self._db.executemany("DELETE FROM lease WHERE lease_id=?", [(i,) for i in old])
            return len(old)

        return await self._write(work)

    def close(self) -> None:
        # A forked child must not close its parent's connection: SQLite would tidy up the parent's log.
        if os.getpid() == self._pid:
            self._db.close()

    # Below: one transaction each.

    async def _read(self, query: str, values: Sequence[Any]) -> list[Lease]:
        rows = await self._retry("read", lambda: self._db.execute(query, values).fetchall())
        return self._readable(rows)

    def _readable(self, rows: Iterable[tuple[Any, ...]]) -> list[Lease]:
        """Without those that are damaged: one such row is no reason to look after none of the others."""
        leases = []
        for row in rows:
            try:
                leases.append(lease_rows.from_row(row, self.ledger_id))
            except (ValueError, TypeError) as error:
                if row[0] not in self._damaged:
                    self._damaged.add(row[0])
                    log.warning("lease %s: its row in %s cannot be read: %s", row[0], self.path, error)
        return leases

    def _get(self, lease_id: str) -> Lease | None:
        row = self._db.execute(f"{lease_rows.SELECT} WHERE lease_id=?", (lease_id,)).fetchone()
        if row is None:
            return None
        try:
            return lease_rows.from_row(row, self.ledger_id)
        except (ValueError, TypeError) as error:
            raise LedgerError(
                f"the row of lease {lease_id} in {self.path} is damaged ({error}): end its sandbox by its id at its "
                "provider"
            ) from error

    def _insert(self, lease: Lease) -> None:
        self._db.execute(lease_rows.INSERT, lease_rows.to_row(lease))
        self._remember(lease.lease_id, None, lease.state, lease.reason or "")

    def _put(self, lease: Lease, **fields: Any) -> Lease:
        """Write these fields, and no others."""
        columns, values = ["changed_at=?"], [time.time()]
        for name, value in fields.items():
            for column, written in lease_rows.written(name, value):
                columns.append(f"{column}=?")
                values.append(written)
        self._db.execute(f"UPDATE lease SET {', '.join(columns)} WHERE lease_id=?", (*values, lease.lease_id))
        return replace(lease, **fields)

    def _remember(self, lease_id: str, before: LeaseState | None, after: LeaseState, why: str) -> None:
        self._db.execute(
            "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)",
            (lease_id, time.time(), before, after, os.getpid(), why),
        )

    async def _write(self, work: Callable[[], T], *, durable: bool = False) -> T:
        def transaction() -> T:
            if durable:
                self._db.execute(_FULL)
            try:
                self._db.execute("BEGIN IMMEDIATE")
                result = work()
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
            finally:
                if durable:
                    self._db.execute(_NORMAL)
            return result

        return await self._retry("write", transaction)

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    async def _retry(self, what: str, work: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.busy_seconds
        delay = 0.002
        while True:
            self.follow()
            try:
                return work()
            except sqlite3.Error as error:
                if not _busy(error) or time.monotonic() > deadline:
                    raise self._error(what, error) from error
            import asyncio  # late: `lowtide ls` reads the ledger without a loop and has to start fast

            await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311
            delay = min(delay * 2, 0.1)

    def _error(self, what: str, error: sqlite3.Error) -> LedgerError:
        text = str(error)
        if "full" in text or "disk I/O" in text:
            advice = "free some disk space, or set LOWTIDE_HOME to another disk"
        elif "readonly" in text or "unable to open" in text:
            advice = "make it writable, or set LOWTIDE_HOME to a directory you can write"
        elif "not a database" in text or "malformed" in text:
            advice = "it is damaged: keep it, set LOWTIDE_HOME to a new directory, and run there for each provider: lowtide sweep --all-ledgers --provider NAME"
        else:
            advice = "if another process holds it, end that process"
        return LedgerError(f"cannot {what} the ledger {self.path}: {text}; {advice}", retryable=_busy(error))


def _make_if_missing(path: Path) -> None:
    """An empty file, without the log of one that was removed: processes that still hold that one share its log."""
    if path.exists():
        return
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # else one process would remove what another has just made
        if not path.exists():
            for rest in ("-wal", "-shm"):
                Path(f"{path}{rest}").unlink(missing_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    finally:
        os.close(lock)


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is at that path."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _busy(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))


def _in(column: str, states: Iterable[LeaseState]) -> tuple[str, list[Any]]:
    names: list[Any] = sorted(str(state) for state in states)
    return f"{column} IN ({', '.join('?' * len(names))})", names
