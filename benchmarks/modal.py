"""Modal, side by side with its own SDK on the same emulator: python -m benchmarks.modal [--json FILE].

Every row is a ratio within one run: lowtide against the raw SDK's async calls, both with one event loop for all of it
and both starting the same program. A raw life is create, one exec, terminate, as people write it; the stricter raw
life also waits until the sandbox is over, which lowtide always does.
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
PROGRAM = "/bin/echo"


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

        limit = max(given.crowd, given.ending) + 20
        with emulator("modal", plain=True, limit=limit, set_environment=True) as served:
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
        rows.append(_row("life", "create, exec, terminate", ours, theirs, LIFE_LIMIT))
        ours, theirs = interleave(
            lambda: timed(mine.life), lambda: timed(lambda: raw.life(confirm=True)), samples=given.samples
        )
        rows.append(
            _row("confirmed", "create, exec, terminate", ours, theirs, LIFE_LIMIT, "that waits for its end")
        )
        with mine.held(), raw.held():
            ours, theirs = interleave(
                lambda: timed(mine.exec), lambda: timed(raw.exec), samples=given.samples * 2
            )
        rows.append(_row("exec", "a later command", ours, theirs, EXEC_LIMIT))
        ours, theirs = interleave(
            lambda: timed(lambda: mine.crowd(given.crowd)),
            lambda: timed(lambda: raw.crowd(given.crowd)),
            samples=given.rounds,
            warm_up=1,
        )
        what = f"{given.crowd} at once: create, exec, terminate"
        rows.append(_row("parallel", what, ours, theirs, CROWD_LIMIT))
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
        against=f"Modal's SDK {how}".rstrip(),
        limit=limit,
        unit="ms",
        ours=ours,
        raw=raw,
        details={},
    )


class _Side:
    """One way of doing it, on one loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.box: Any = None

    def life(self, *, confirm: bool = False) -> None:
        self.loop.run_until_complete(self._life(confirm))

    def crowd(self, count: int) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self._life(False) for _ in range(count)))

        self.loop.run_until_complete(all_of_them())

    def held(self) -> _Side:
        return self

    def __enter__(self) -> None:
        self.box = self.loop.run_until_complete(self._create())
        self.exec()

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self._end(self.box))

    def exec(self) -> None:
        self.loop.run_until_complete(self._exec(self.box))

    async def _life(self, confirm: bool) -> None:
        box = await self._create()
        await self._exec(box)
        await self._end(box, confirm)

    def close(self) -> None:
        self.loop.close()

    async def _create(self) -> Any:
        raise NotImplementedError

    async def _exec(self, box: Any) -> None:
        raise NotImplementedError

    async def _end(self, box: Any, confirm: bool = False) -> None:
        raise NotImplementedError


class Ours(_Side):
    """The same through lowtide."""

    async def _create(self) -> Any:
        from lowtide import Sandbox

        return await Sandbox.run(provider="modal")

    async def _exec(self, box: Any) -> None:
        assert (await box.exec([PROGRAM, "hi"])).stdout == "hi\n"

    async def _end(self, box: Any, confirm: bool = False) -> None:
        await box.stop(graceful_shutdown_seconds=0.0)


class Raw(_Side):
    """The SDK as its documentation uses it, with one app and one image for all."""

    def __init__(self) -> None:
        import modal

        super().__init__()
        self._modal = modal
        self._image = modal.Image.debian_slim(python_version="3.11")
        self._app = self.loop.run_until_complete(modal.App.lookup.aio("raw", create_if_missing=True))

    async def _create(self) -> Any:
        return await self._modal.Sandbox.create.aio(app=self._app, image=self._image)

    async def _exec(self, box: Any) -> None:
        process = await box.exec.aio(PROGRAM, "hi")
        assert await process.stdout.read.aio() == "hi\n"
        assert await process.wait.aio() == 0

    async def _end(self, box: Any, confirm: bool = False) -> None:
        await box.terminate.aio(wait=confirm)


def ending(served: Any, count: int, rounds: int) -> Comparison:
    """So many sandboxes whose terminates take 100 ms each, ended at once."""
    from lowtide import Sandbox, results

    def end(boxes: list[Sandbox]) -> float:
        served.faults.add("kill-hangs", seconds=0.1, count=None)
        try:
            return timed(lambda: results([box.stop(graceful_shutdown_seconds=0.0) for box in boxes]))
        finally:
            served.faults.clear()

    took = []
    for _ in range(rounds):
        boxes = [Sandbox(provider="modal") for _ in range(count)]
        for start in range(0, count, 50):
            results([box.start() for box in boxes[start : start + 50]])
        took.append(end(boxes))
    return Comparison(
        name="ending",
        what=f"ending {count} at once, each terminate taking 100 ms",
        against="the clock",
        limit=None,
        at_most=ENDING_MS,
        unit="ms",
        ours=tuple(took),
        raw=(),
        details={},
    )


if __name__ == "__main__":
    main()
