"""The ledger keeps every row: under many writers, after torn writes, on a full disk."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import logger
from lowtide.errors import LedgerError
from lowtide.lifecycle.lease import Lease, LeaseState, new_lease_id
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.sqlite_ledger import SqliteLedger


def lease(ledger: SqliteLedger, **fields: object) -> Lease:
    made = Lease(
        lease_id=new_lease_id(),
        provider="local",
        account="here",
        owner=Owner.current(),
        ledger_id=ledger.ledger_id,
        tags=("a", "b"),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path) -> SqliteLedger:
    return SqliteLedger(tmp_path / "ledger.db")


async def test_a_row_comes_back_as_it_was_written(ledger: SqliteLedger) -> None:
    row = lease(ledger, session="s", expires_at=12.5, recovery={"image": "python:3.11"})
    await ledger.intend(row)
    assert await ledger.get(row.lease_id) == row


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("pid", 2**40),
        ("pid", -1),
        ("start_time", "x"),
        ("max_lifetime_at", "soon"),
        ("lifetime_seconds", 1e308),
        ("sandbox_id", b"\xff"),
        ("tags", "[1]"),
        ("recovery", "[]"),
        ("began", "nothing"),
    ],
)
async def test_a_damaged_row_is_said_and_keeps_nobody_from_the_others(
    ledger: SqliteLedger, column: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, sound = lease(ledger), lease(ledger)
    await ledger.intend(damaged)
    await ledger.intend(sound)
    ledger._db.execute(f"UPDATE lease SET {column}=? WHERE lease_id=?", (value, damaged.lease_id))
    assert await ledger.leases() == [sound]
    logger.flush(10.0)
    assert damaged.lease_id in caplog.text


async def test_rows_of_the_same_moment_go_to_the_disk_together(ledger: SqliteLedger) -> None:
    commits: list[str] = []
    ledger._db.set_trace_callback(lambda text: commits.append(text) if text == "COMMIT" else None)
    rows = [lease(ledger) for _ in range(50)]
    await asyncio.gather(*(ledger.intend(row) for row in rows))
    assert len(commits) <= 3
    assert {row.lease_id for row in rows} == {row.lease_id for row in await ledger.leases()}


async def test_a_row_that_cannot_be_written_keeps_no_other_from_it(ledger: SqliteLedger) -> None:
    rows = [lease(ledger) for _ in range(5)]
    await ledger.intend(rows[2])
    results = await asyncio.gather(*(ledger.intend(row) for row in rows), return_exceptions=True)
    assert [isinstance(result, LedgerError) for result in results] == [False, False, True, False, False]
    assert {row.lease_id for row in rows} == {row.lease_id for row in await ledger.leases()}


async def test_a_row_given_up_before_it_was_written_is_not_written(ledger: SqliteLedger) -> None:
    rows = [lease(ledger) for _ in range(3)]
    writing = [asyncio.ensure_future(ledger.intend(row)) for row in rows]
    await asyncio.sleep(0)
    writing[1].cancel()
    await asyncio.wait(writing)
    assert {row.lease_id for row in await ledger.leases()} == {rows[0].lease_id, rows[2].lease_id}


async def test_change_happens_only_from_the_expected_state_and_owner(ledger: SqliteLedger) -> None:
    row = lease(ledger)
    await ledger.intend(row)
    stranger = replace(row.owner, pid=row.owner.pid + 1)
    assert await ledger.change(row.lease_id, LeaseState.LIVE, before={LeaseState.KEPT}) is None
    refused = await ledger.change(
        row.lease_id, LeaseState.LIVE, before={LeaseState.INTENDED}, owned_by=stranger
    )
    assert refused is None
    live = await ledger.change(
        row.lease_id, LeaseState.LIVE, before={LeaseState.INTENDED}, owned_by=row.owner, sandbox_id="x"
    )
    assert live is not None
    assert (live.state, live.sandbox_id) == (LeaseState.LIVE, "x")
    assert await ledger.get(row.lease_id) == live


async def test_history_tells_the_story_of_one_lease(ledger: SqliteLedger) -> None:
    row = lease(ledger)
    await ledger.intend(row)
    await ledger.change(row.lease_id, LeaseState.LIVE, before={LeaseState.INTENDED}, why="made")
    await ledger.change(row.lease_id, LeaseState.ENDING, before={LeaseState.LIVE}, why="owner died")
    lines = await ledger.history(row.lease_id)
    assert [line.after for line in lines] == [LeaseState.INTENDED, LeaseState.LIVE, LeaseState.ENDING]
    assert lines[-1].why == "owner died"
    assert all(line.pid == os.getpid() for line in lines)


async def test_only_one_of_many_racing_processes_wins_a_change(ledger: SqliteLedger) -> None:
    rows = [lease(ledger) for _ in range(20)]
    for row in rows:
        await ledger.intend(row)
    command = [sys.executable, "-c", CLAIMER, str(ledger.path), *(row.lease_id for row in rows)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    wins = " ".join(racer.communicate()[0] for racer in racers).split()
    assert sorted(wins) == sorted(row.lease_id for row in rows)


CLAIMER = """
import asyncio, sys
from pathlib import Path
from lowtide.lifecycle.lease import LeaseState
from lowtide.lifecycle.sqlite_ledger import SqliteLedger

async def main():
    ledger = SqliteLedger(Path(sys.argv[1]))
    for lease_id in sys.argv[2:]:
        if await ledger.change(lease_id, LeaseState.ENDING, before={LeaseState.INTENDED}):
            print(lease_id)

asyncio.run(main())
"""


WRITER = """
import asyncio, sys
from pathlib import Path
from lowtide.lifecycle.lease import *
from lowtide.lifecycle.sqlite_ledger import SqliteLedger

async def main():
    ledger = SqliteLedger(Path(sys.argv[1]))
    while True:
        row = Lease(lease_id=new_lease_id(), provider="p", account="a", owner=Owner.current(), ledger_id=ledger.ledger_id)
        await ledger.intend(row)
        print(row.lease_id, flush=True)

asyncio.run(main())
"""


async def test_what_was_acknowledged_survives_a_kill_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    written: list[str] = []
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        written += [writer.stdout.readline().strip() for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        written += [line.strip() for line in writer.stdout.read().splitlines() if len(line.strip()) == 26]
        writer.wait()
    ledger = SqliteLedger(path)
    kept = {row.lease_id for row in await ledger.leases()}
    assert set(written) <= kept


async def test_a_torn_write_at_the_end_of_the_log_loses_no_earlier_row(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    first = [writer.stdout.readline().strip() for _ in range(5)]
    writer.kill()
    writer.wait()
    writer.stdout.close()
    wal = path.with_name("ledger.db-wal")
    with wal.open("r+b") as file:  # half of a page that never made it to the disk
        file.seek(0, os.SEEK_END)
        file.write(os.urandom(2048))
    (path.with_name("ledger.db-shm")).unlink(missing_ok=True)
    ledger = SqliteLedger(path)
    assert set(first) <= {row.lease_id for row in await ledger.leases()}
    await ledger.intend(lease(ledger))


async def test_a_full_disk_is_a_clear_error_and_loses_no_row(ledger: SqliteLedger) -> None:
    before = [lease(ledger) for _ in range(3)]
    for row in before:
        await ledger.intend(row)
    used = ledger.path.with_name("ledger.db-wal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel's "no more bytes for this file": what a full disk looks like to a writer.
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (used, hard))
    try:
        with pytest.raises(LedgerError, match="free some disk space"):
            for _ in range(50):
                await ledger.intend(lease(ledger))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert {row.lease_id for row in before} <= {row.lease_id for row in await ledger.leases()}
    await ledger.intend(lease(ledger))


def test_a_damaged_ledger_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"this is not a database" * 400)
    with pytest.raises(LedgerError, match="damaged"):
        SqliteLedger(path)
    assert path.read_bytes().startswith(b"this is not a database")


async def test_another_writer_does_not_block_the_event_loop(ledger: SqliteLedger) -> None:
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writing = asyncio.ensure_future(ledger.intend(lease(ledger)))
    ticks = 0
    started = time.monotonic()
    while time.monotonic() - started < 0.5:
        await asyncio.sleep(0.005)
        ticks += 1
    assert not writing.done()
    assert ticks > 5
    other.execute("COMMIT")
    await asyncio.wait_for(writing, 5)
    other.close()


async def test_rows_are_found_by_tag_owner_and_state(ledger: SqliteLedger) -> None:
    mine = lease(ledger)
    other = lease(ledger, tags=("a",), owner=replace(Owner.current(), pid=1, start_time=1))
    gone = lease(ledger, state=LeaseState.GONE)
    for row in (mine, other, gone):
        await ledger.intend(row)
    assert {row.lease_id for row in await ledger.leases()} == {mine.lease_id, other.lease_id}
    assert [row.lease_id for row in await ledger.leases(tags=["b"])] == [mine.lease_id]
    assert [row.lease_id for row in await ledger.leases(owner=other.owner)] == [other.lease_id]
    assert len(await ledger.owners()) == 2


async def test_only_rows_that_are_gone_are_ever_forgotten(ledger: SqliteLedger) -> None:
    kept, gone = lease(ledger), lease(ledger, state=LeaseState.GONE)
    await ledger.intend(kept)
    await ledger.intend(gone)
    assert await ledger.forget(gone_before=time.time() + 1) == 1
    assert await ledger.get(kept.lease_id) is not None
    assert await ledger.get(gone.lease_id) is None


def test_the_file_is_readable_by_its_owner_alone(ledger: SqliteLedger) -> None:
    assert ledger.path.stat().st_mode & 0o077 == 0
