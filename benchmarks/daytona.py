"""Daytona, side by side with its own async SDK on the same emulator: python -m benchmarks.daytona [--json FILE].

Every row is a ratio within one run: lowtide against the raw async SDK, both with one event loop for all
of it and both starting the same program. A life is create, one exec, and a delete that is waited for, which
lowtide always does and the raw side is asked to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, page, state
from benchmarks.measure import Comparison, interleave, timed

LIFE_LIMIT, EXEC_LIMIT, CROWD_LIMIT, ENDING_MS = 1.08, 0.7, 1.08, 1500.0
PROGRAM = "/bin/echo"
_CONFIRMED = "that waits for its delete"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--crowd", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ending", type=int, default=200)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="lowtide-bench-"))
    os.environ["LOWTIDE_HOME"] = str(home)
    try:
        from lowtide.testing import emulator

        with emulator(
            "daytona", plain=True, limit=max(given.crowd, given.ending) + 20, set_environment=True
        ) as served:
            rows = measured(served, given)
    finally:
        state.end(home)
    report = {"machine": machine.facts(), "results": [row.as_json() for row in rows]}
    print(page.table(report["results"]))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(report, file, indent=2)


def measured(served: Any, given: argparse.Namespace) -> list[Comparison]:
    raw, mine = Raw(), Ours()
    rows = []
    try:
        ours, theirs = interleave(lambda: timed(mine.life), lambda: timed(raw.life), samples=given.samples)
        rows.append(_row("life", "create, exec, delete", ours, theirs, LIFE_LIMIT, _CONFIRMED))
        mine.begin()
        raw.begin()
        ours, theirs = interleave(
            lambda: timed(mine.command), lambda: timed(raw.command), samples=4 * given.samples
        )
        rows.append(_row("exec", "exec, second and later", ours, theirs, EXEC_LIMIT))
        mine.end()
        raw.end()
        ours, theirs = interleave(
            lambda: timed(lambda: mine.crowd(given.crowd)),
            lambda: timed(lambda: raw.crowd(given.crowd)),
            samples=given.rounds,
            warm_up=1,
        )
        what = f"{given.crowd} at once: create, exec, delete"
        rows.append(_row("parallel", what, ours, theirs, CROWD_LIMIT, _CONFIRMED))
        rows.append(ending(served, given.ending, given.rounds))
    finally:
        raw.close()
        mine.close()
    return rows


def _row(
    name: str, what: str, ours: tuple[float, ...], raw: tuple[float, ...], limit: float, how: str = ""
) -> Comparison:
    return Comparison(
        name=name,
        what=what,
        against=f"Daytona's async SDK {how}".rstrip(),
        limit=limit,
        unit="ms",
        ours=ours,
        raw=raw,
        details={},
    )


class Ours:
    """The same through lowtide."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def life(self) -> None:
        self._loop.run_until_complete(self._life())

    def crowd(self, count: int) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._life() for _ in range(count)))

        self._loop.run_until_complete(all_of_them())

    def begin(self) -> None:
        from lowtide import Sandbox

        async def start() -> None:
            self._box = Sandbox.run(provider="daytona")
            await self._box.start()

        self._loop.run_until_complete(start())
        self.command()

    def command(self) -> None:
        self._loop.run_until_complete(self._command(self._box))

    def end(self) -> None:
        async def stop() -> None:
            await self._box.stop()

        self._loop.run_until_complete(stop())

    async def _command(self, box: Any) -> None:
        assert (await box.exec([PROGRAM, "hi"])).stdout == "hi\n"

    async def _life(self) -> None:
        from lowtide import Sandbox

        async with Sandbox.run(provider="daytona") as box:
            await self._command(box)

    def close(self) -> None:
        self._loop.close()


def ending(served: Any, count: int, rounds: int) -> Comparison:
    """So many sandboxes whose deletes take 100 ms each, ended at once."""
    from lowtide import Sandbox, results

    def end(boxes: list[Sandbox]) -> float:
        served.faults.add("kill-hangs", seconds=0.1, count=None)
        try:
            return timed(lambda: results([box.stop(graceful_shutdown_seconds=0.0) for box in boxes]))
        finally:
            served.faults.clear()

    took = []
    for _ in range(rounds):
        boxes = [Sandbox(provider="daytona") for _ in range(count)]
        for start in range(0, count, 50):
            results([box.start() for box in boxes[start : start + 50]])
        took.append(end(boxes))
    return Comparison(
        name="ending",
        what=f"ending {count} at once, each delete taking 100 ms",
        against="the clock",
        limit=None,
        at_most=ENDING_MS,
        unit="ms",
        ours=tuple(took),
        raw=(),
        details={},
    )


class Raw:
    """The SDK as its documentation uses it, with one client and one loop."""

    def __init__(self) -> None:
        from daytona import AsyncDaytona

        self._loop = asyncio.new_event_loop()

        async def connect() -> AsyncDaytona:
            return AsyncDaytona()

        self._sdk = self._loop.run_until_complete(connect())

    def life(self) -> None:
        self._loop.run_until_complete(self._life())

    def crowd(self, count: int) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._life() for _ in range(count)))

        self._loop.run_until_complete(all_of_them())

    def begin(self) -> None:
        self._box = self._loop.run_until_complete(self._sdk.create())
        self.command()

    def command(self) -> None:
        self._loop.run_until_complete(self._command(self._box))

    def end(self) -> None:
        self._loop.run_until_complete(self._box.delete(wait=True))

    async def _command(self, box: Any) -> None:
        assert (await box.process.exec(f"{PROGRAM} hi")).result == "hi\n"

    async def _life(self) -> None:
        box = await self._sdk.create()
        await self._command(box)
        await box.delete(wait=True)

    def close(self) -> None:
        self._loop.run_until_complete(self._sdk.close())
        self._loop.close()


if __name__ == "__main__":
    main()
