"""The ledger in SQLite: rows and their history.

Every change of state is a compare-and-set, written together with a line of history in one
transaction. A row is never deleted before its sandbox is confirmed gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import LedgerError
from lowtide.lifecycle import lease_rows
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.ledger import OPEN_STATES, HistoryLine
from lowtide.lifecycle.ledger_file import LedgerFile
from lowtide.lifecycle.owner import Owner

if TYPE_CHECKING:
    import asyncio

_A_FEW = 4
"""Of the rows that an id could mean: enough to say which, or that it is not clear."""
_SEARCHED = 1000
"""How many of the newest rows are searched for the end of an id, for which there is no index."""


class SqliteLedger(LedgerFile):
    """The leases of this user on this machine, in one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._intended: list[tuple[Lease, asyncio.Future[None]]] = []
        self._intending: asyncio.Task[None] | None = None

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

    # Below: one transaction each.

    async def _read(self, query: str, values: Sequence[Any]) -> list[Lease]:
        rows = await self._retry("read", lambda: self._db.execute(query, values).fetchall())
        return self._readable(rows)

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


def _in(column: str, states: Iterable[LeaseState]) -> tuple[str, list[Any]]:
    names: list[Any] = sorted(str(state) for state in states)
    return f"{column} IN ({', '.join('?' * len(names))})", names
