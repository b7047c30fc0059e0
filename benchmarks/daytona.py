"""Daytona, side by side with its own async SDK on the same emulator: python -m benchmarks.daytona [--json FILE].

Every row is a ratio within one run: lowtide against the raw async SDK. A raw life is
create, one exec, delete, as people write it; the stricter raw life also asks for its delete to be
confirmed, which lowtide always does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from typing import Any

from benchmarks.measure import Comparison, interleave, timed

LIFE_LIMIT, CROWD_LIMIT, ENDING_SECONDS = 1.05, 1.05, 1.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--crowd", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ending", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-") as home:
        os.environ["LOWTIDE_HOME"] = home
        from lowtide.testing import emulator

        with emulator(
            "daytona", plain=True, limit=max(given.crowd, given.ending) + 20, set_environment=True
        ) as served:
            rows = measured(served, given)
    for row in rows:
        print(
            f"{row['name']:<28} ours {row['ours']:>9.1f} {row['unit']}  against {row['raw']:>9.1f}  "
            f"ratio {row['ratio']:.3f}  limit {row['limit']:g}  {'met' if row['met'] else 'NOT MET'}"
        )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)


def measured(served: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    raw = Raw()
    rows = []
    try:
        ours, theirs = interleave(lambda: timed(life), lambda: timed(raw.life), samples=given.samples)
        rows.append(_row("create, exec, delete", ours, theirs, LIFE_LIMIT))
        ours, theirs = interleave(
            lambda: timed(life), lambda: timed(lambda: raw.life(confirm=True)), samples=given.samples
        )
        rows.append(_row("the same, delete confirmed", ours, theirs, LIFE_LIMIT))
        ours, theirs = interleave(
            lambda: timed(lambda: crowd(given.crowd)),
            lambda: timed(lambda: raw.crowd(given.crowd)),
            samples=given.rounds,
            warm_up=1,
        )
        rows.append(_row(f"{given.crowd} in parallel", ours, theirs, CROWD_LIMIT))
        rows.append(ending(served, given.ending))
    finally:
        raw.close()
    return rows


def _row(name: str, ours: tuple[float, ...], raw: tuple[float, ...], limit: float) -> dict[str, Any]:
    compared = Comparison(
        name=name,
        what="lowtide",
        against="daytona's async SDK",
        limit=limit,
        unit="ms",
        ours=ours,
        raw=raw,
        details={},
    )
    return {
        "name": name,
        "unit": "ms",
        "ours": statistics.median(ours),
        "raw": statistics.median(raw),
        "ratio": compared.ratio,
        "limit": limit,
        "met": compared.met,
    }


def life() -> None:
    from lowtide import Sandbox

    async def one() -> None:
        async with Sandbox.run(provider="daytona") as box:
            assert (await box.exec(["echo", "hi"])).stdout == "hi\n"

    asyncio.run(one())


def crowd(count: int) -> None:
    from lowtide import Sandbox

    async def one() -> None:
        async with Sandbox.run(provider="daytona") as box:
            assert (await box.exec(["echo", "hi"])).stdout == "hi\n"

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(all_of_them())


def ending(served: Any, count: int) -> dict[str, Any]:
    """So many sandboxes whose deletes take 100 ms each, ended at once."""
    from lowtide import Sandbox, results

    boxes = [Sandbox(provider="daytona") for _ in range(count)]
    for start in range(0, count, 50):
        results([box.start() for box in boxes[start : start + 50]])
    served.faults.add("kill-hangs", seconds=0.1, count=None)
    began = time.perf_counter()
    results([box.stop(graceful_shutdown_seconds=0.0) for box in boxes])
    took = time.perf_counter() - began
    served.faults.clear()
    return {
        "name": f"ending {count}, 100 ms each",
        "unit": "ms",
        "ours": took * 1000,
        "raw": ENDING_SECONDS * 1000,
        "ratio": took / ENDING_SECONDS,
        "limit": 1.0,
        "met": took <= ENDING_SECONDS,
    }


class Raw:
    """The SDK as its documentation uses it, with one client and one loop."""

    def __init__(self) -> None:
        from daytona import AsyncDaytona

        self._loop = asyncio.new_event_loop()

        async def connect() -> AsyncDaytona:
            return AsyncDaytona()

        self._sdk = self._loop.run_until_complete(connect())

    def life(self, *, confirm: bool = False) -> None:
        self._loop.run_until_complete(self._life(confirm))

    def crowd(self, count: int) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._life(False) for _ in range(count)))

        self._loop.run_until_complete(all_of_them())

    async def _life(self, confirm: bool) -> None:
        box = await self._sdk.create()
        assert (await box.process.exec("echo hi")).result == "hi\n"
        await box.delete(wait=confirm)

    def close(self) -> None:
        self._loop.run_until_complete(self._sdk.close())
        self._loop.close()


if __name__ == "__main__":
    main()
