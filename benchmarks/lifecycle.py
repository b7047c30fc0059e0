"""What the lifecycle costs: ledger and guardian per sandbox, the end of a killed owner, a long ledger."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.life import PAUSE_SECONDS
from benchmarks.measure import Comparison, interleave, timed
from benchmarks.no_ledger import no_ledger
from benchmarks.raw import RawBubblewrap
from lowtide import Sandbox
from lowtide.lifecycle.lease import Lease, LeaseState, new_lease_id
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.lifecycle.sweep import sweep
from lowtide.providers import registry


def ledger_and_guardian(home: Path, samples: int) -> Comparison:
    """The same life through the same calls, with its row and its guardian, and with neither."""

    def life() -> None:
        sandbox = Sandbox.run(provider="local")
        sandbox.exec(["true"]).result()
        sandbox.stop().result()

    def bare() -> float:
        with no_ledger(home):
            return timed(life)

    mine, theirs = interleave(lambda: timed(life), bare, samples=samples, pause=PAUSE_SECONDS)
    return Comparison(
        name="ledger",
        what="run, exec, stop with ledger and guardian",
        against="the same calls with neither",
        limit=1.15,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )


_OWNER = """
import sys, time
from lowtide import Sandbox, results
boxes = [Sandbox(provider="local") for _ in range(int(sys.argv[1]))]
for n in range(0, len(boxes), 50):
    results([box.start() for box in boxes[n:n + 50]])
print("READY", flush=True)
time.sleep(600)
"""


def killed_owner(home: Path, count: int) -> Comparison:
    """From kill -9 of an owner of `count` sandboxes until all of them, their files and rows are gone."""
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(count)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"READY\n"
    ledger = SqliteLedger(home / "ledger.db")
    started = time.perf_counter()
    owner.kill()
    while any(lease.owner.pid == owner.pid for lease in asyncio.run(ledger.leases())):
        time.sleep(0.01)
    mine = (time.perf_counter() - started) * 1000
    owner.wait()
    ledger.close()
    return Comparison(
        name="killed-owner",
        what=f"ending the {count} sandboxes of a killed owner",
        against=f"killing {count} bare bubblewrap processes and removing their directories",
        limit=1.5,
        unit="ms",
        ours=(mine,),
        raw=(_bare_kills(home, count),),
        at_most=5000.0,
        details={},
    )


def _bare_kills(home: Path, count: int) -> float:
    bubblewrap = RawBubblewrap(home)
    running: list[subprocess.Popen[bytes]] = []
    try:
        argvs = [bubblewrap.argv("sleep", "600") for _ in range(count)]
        running += [
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) for argv in argvs
        ]
        processes.until_up(running)
        places = sorted({Path(argv[argv.index("--overlay") + 1]).parent for argv in argvs})
        started = time.perf_counter()
        for process in running:
            process.send_signal(signal.SIGKILL)
        for process in running:
            process.wait()
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        return (time.perf_counter() - started) * 1000
    finally:
        processes.end(running)
        bubblewrap.close()


def long_ledger(home: Path, samples: int) -> list[Comparison]:
    """`lowtide ls` and a sweep with 10,000 rows against 100, per row shown."""
    places = {count: _ledger_of(home / f"rows-{count}", count) for count in (100, 10_000)}

    def listing(count: int) -> float:
        environ = {**os.environ, "LOWTIDE_HOME": str(places[count])}
        command = [sys.executable, "-m", "lowtide", "ls", "--json"]
        return (
            timed(lambda: subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)) / count
        )

    def sweeping(count: int) -> float:
        async def work() -> None:
            ledger = SqliteLedger(places[count] / "ledger.db")
            provider = registry.provider_class("local").connect({"LOWTIDE_HOME": str(places[count])})
            await sweep(ledger, {"local": provider}, dry_run=True)
            ledger.close()
            await provider.aclose()

        return timed(lambda: asyncio.run(work())) / count

    comparisons = []
    for name, measure in (("ls", listing), ("sweep", sweeping)):
        mine, theirs = interleave(
            partial(measure, 10_000),
            partial(measure, 100),
            samples=samples,
            warm_up=1,
        )
        comparisons.append(
            Comparison(
                name=f"rows-{name}",
                what=f"`lowtide {name}` with 10,000 rows, per row",
                against="with 100 rows, per row",
                limit=2.0,
                unit="ms",
                ours=mine,
                raw=theirs,
                details={},
            )
        )
    return comparisons


def _ledger_of(home: Path, count: int) -> Path:
    home.mkdir(mode=0o700)
    ledger = SqliteLedger(home / "ledger.db")
    account = registry.provider_class("local").connect({"LOWTIDE_HOME": str(home)}).account
    # A living owner, so that a sweep looks at each and ends none.
    row = Lease(
        lease_id="",
        provider="local",
        account=account,
        owner=Owner.current(),
        ledger_id=ledger.ledger_id,
        state=LeaseState.LIVE,
    )

    async def fill() -> None:
        for _ in range(count):
            lease_id = new_lease_id()
            await ledger.intend(replace(row, lease_id=lease_id, sandbox_id=lease_id), durable=False)

    asyncio.run(fill())
    ledger.close()
    return home
