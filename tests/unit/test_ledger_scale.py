"""A ledger with 100,000 ended rows is as quick to ask as one with 1,000: counted in the database's own steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.lifecycle.lease import Lease, LeaseState, new_lease_id
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.ui import fleet as listing

FEW, MANY = 1_000, 100_000
Question = Callable[[SqliteLedger], Coroutine[Any, Any, Any]]

QUESTIONS: dict[str, Question] = {
    "ls": lambda ledger: listing.leases(ledger, None, (), 0),
    "ls --all": lambda ledger: listing.leases(ledger, None, (), 1000),
    "rm unknown": lambda ledger: _named(ledger, "sandbox-that-nobody-has-made"),
    "beginning of an id": lambda ledger: _named(ledger, "zzzz"),
    "history": lambda ledger: ledger.history(new_lease_id()),
    "from_id unknown": lambda ledger: ledger.find(None, None, "sandbox-that-nobody-has-made"),
    "owners": lambda ledger: ledger.owners(),
}


async def _named(ledger: SqliteLedger, text: str) -> list[Lease]:
    return await ledger.named(text, ended=False) + await ledger.named(text, ended=True)


def filled(path: Path, count: int) -> SqliteLedger:
    ledger = SqliteLedger(path)
    live = Lease(
        lease_id=new_lease_id(),
        provider="local",
        account="a",
        owner=Owner.current(),
        ledger_id=ledger.ledger_id,
        state=LeaseState.LIVE,
    )
    first = replace(live, lease_id="0" * 26, state=LeaseState.GONE)

    async def fill() -> None:
        await ledger.intend(first)
        for number in range(20):
            lease_id = new_lease_id(1e9 + number)
            await ledger.intend(replace(live, lease_id=lease_id, sandbox_id=f"box-{lease_id}"), durable=False)

    asyncio.run(fill())
    columns = [row[1] for row in ledger._db.execute("PRAGMA table_info(lease)")]
    copied = ", ".join(
        {"lease_id": "printf('%026d', n)", "sandbox_id": "printf('box-%026d', n)"}.get(name, name)
        for name in columns
    )
    ledger._db.executescript(f"""
        CREATE TEMP TABLE numbers AS
          WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < {count}) SELECT n FROM count;
        INSERT INTO lease SELECT {copied} FROM lease, numbers WHERE lease_id = '{first.lease_id}';
        INSERT INTO history SELECT lease_id, 0, NULL, 'live', 1, '' FROM lease;
        INSERT INTO history SELECT lease_id, 0, 'live', 'gone', 1, '' FROM lease;
    """)
    return ledger


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, SqliteLedger]:
    path = tmp_path_factory.mktemp("scale")
    return {count: filled(path / f"{count}.db", count) for count in (FEW, MANY)}


def steps(ledger: SqliteLedger, question: Question) -> int:
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    ledger._db.set_progress_handler(count, 10)
    try:
        asyncio.run(question(ledger))
    finally:
        ledger._db.set_progress_handler(None, 0)
    return counted


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_rows_that_have_ended_cost_nothing(ledgers: dict[int, SqliteLedger], question: str) -> None:
    few, many = (steps(ledgers[count], QUESTIONS[question]) for count in (FEW, MANY))
    assert many <= 2 * few + 10, f"{few * 10} steps with {FEW:,} rows, {many * 10} with {MANY:,}"


def test_the_newest_ended_ones_are_listed(ledgers: dict[int, SqliteLedger]) -> None:
    leases = asyncio.run(listing.leases(ledgers[MANY], None, (), 5))
    assert [lease.state for lease in leases] == [LeaseState.LIVE] * 20 + [LeaseState.GONE] * 5
    assert [int(lease.lease_id) for lease in leases[20:]] == list(range(MANY - 4, MANY + 1))


@pytest.mark.parametrize("part", ["whole", "beginning", "end", "lease"])
def test_a_row_is_found_by_a_part_of_its_id(ledgers: dict[int, SqliteLedger], part: str) -> None:
    (lease,) = asyncio.run(ledgers[MANY].leases(states=[LeaseState.GONE], newest=1))
    assert lease.sandbox_id is not None
    text = {
        "whole": lease.sandbox_id,
        "beginning": lease.sandbox_id[:-5],
        "end": lease.lease_id[-12:],
        "lease": lease.lease_id,
    }[part]
    found = asyncio.run(ledgers[MANY].named(text, ended=True))
    assert [one.lease_id for one in found] == [lease.lease_id]
    assert asyncio.run(ledgers[MANY].named(text, ended=False)) == []
