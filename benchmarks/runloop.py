"""Runloop, side by side with its own async SDK on the same emulator: python -m benchmarks.runloop [--json FILE].

Every row is a ratio within one run: lowtide against the raw async SDK, both with one event loop for all
of it and both starting the same program. A raw life is create, one exec, shutdown, as people write it.
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

LIFE_LIMIT, EXEC_LIMIT, CROWD_LIMIT, ENDING_MS = 1.05, 0.9, 1.05, 1500.0
NAMES = ("life", "exec", "parallel", "ending")
PROGRAM = "/bin/echo"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--crowd", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ending", type=int, default=200)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="lowtide-bench-"))
    os.environ["LOWTIDE_HOME"] = str(home)
    try:
        from lowtide.testing import emulator

        limit = max(given.crowd, given.ending) + 20
        with emulator("runloop", plain=True, limit=limit, set_environment=True) as served:
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
        if "life" in given.only:
            ours, theirs = interleave(
                lambda: timed(mine.life), lambda: timed(raw.life), samples=given.samples
            )
            rows.append(_row("life", "create, exec, shutdown", ours, theirs, LIFE_LIMIT))
        if "exec" in given.only:
            mine.begin()
            raw.begin()
            ours, theirs = interleave(
                lambda: timed(mine.command), lambda: timed(raw.command), samples=given.samples * 4
            )
            raw.end()
            mine.end()
            rows.append(_row("exec", "a later exec", ours, theirs, EXEC_LIMIT))
        if "parallel" in given.only:
            ours, theirs = interleave(
                lambda: timed(lambda: mine.crowd(given.crowd)),
                lambda: timed(lambda: raw.crowd(given.crowd)),
                samples=given.rounds,
                warm_up=1,
            )
            rows.append(
                _row("parallel", f"{given.crowd} at once: create, exec, shutdown", ours, theirs, CROWD_LIMIT)
            )
        if "ending" in given.only:
            rows.append(ending(served, given.ending, given.rounds))
    finally:
        raw.close()
        mine.close()
    return rows


def _row(name: str, what: str, ours: tuple[float, ...], raw: tuple[float, ...], limit: float) -> Comparison:
    return Comparison(
        name=name,
        what=what,
        against="Runloop's async SDK",
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
        self._box: Any = None

    def life(self) -> None:
        self._loop.run_until_complete(self._life())

    def crowd(self, count: int) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._life() for _ in range(count)))

        self._loop.run_until_complete(all_of_them())

    async def _life(self) -> None:
        from lowtide import Sandbox

        async with Sandbox.run(provider="runloop") as box:
            assert (await box.exec([PROGRAM, "hi"])).stdout == "hi\n"

    def begin(self) -> None:
        from lowtide import Sandbox

        self._box = Sandbox.run(provider="runloop")

    def command(self) -> None:
        async def once() -> None:
            assert (await self._box.exec([PROGRAM, "hi"])).stdout == "hi\n"

        self._loop.run_until_complete(once())

    def end(self) -> None:
        self._box.stop().result()

    def close(self) -> None:
        self._loop.close()


def ending(served: Any, count: int, rounds: int) -> Comparison:
    """So many sandboxes whose shutdowns take 100 ms each, ended at once."""
    from lowtide import Sandbox, results

    def end(boxes: list[Sandbox]) -> float:
        served.faults.add("kill-hangs", seconds=0.1, count=None)
        try:
            return timed(lambda: results([box.stop(graceful_shutdown_seconds=0.0) for box in boxes]))
        finally:
            served.faults.clear()

    took = []
    for _ in range(rounds):
        boxes = [Sandbox(provider="runloop") for _ in range(count)]
        for start in range(0, count, 50):
            results([box.start() for box in boxes[start : start + 50]])
        took.append(end(boxes))
    return Comparison(
        name="ending",
        what=f"ending {count} at once, each shutdown taking 100 ms",
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
        from runloop_api_client import AsyncRunloop

        self._loop = asyncio.new_event_loop()

        async def connect() -> AsyncRunloop:
            return AsyncRunloop()

        self._sdk = self._loop.run_until_complete(connect())
        self._id = ""

    def life(self) -> None:
        self._loop.run_until_complete(self._life())

    def crowd(self, count: int) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._life() for _ in range(count)))

        self._loop.run_until_complete(all_of_them())

    async def _life(self) -> None:
        box = await self._sdk.devboxes.create_and_await_running()
        await self._exec(box.id)
        await self._sdk.devboxes.shutdown(box.id)

    async def _exec(self, devbox_id: str) -> None:
        ran = await self._sdk.devboxes.execute_and_await_completion(devbox_id, command=f"{PROGRAM} hi")
        assert ran.stdout == "hi\n"

    def begin(self) -> None:
        self._id = self._loop.run_until_complete(self._sdk.devboxes.create_and_await_running()).id

    def command(self) -> None:
        self._loop.run_until_complete(self._exec(self._id))

    def end(self) -> None:
        self._loop.run_until_complete(self._sdk.devboxes.shutdown(self._id))

    def close(self) -> None:
        self._loop.run_until_complete(self._sdk.close())
        self._loop.close()


if __name__ == "__main__":
    main()
