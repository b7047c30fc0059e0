"""A hosted provider against its own SDK, on the same emulator, in the same run: ``python -m benchmarks.hosted PROVIDER``.

Both sides have one event loop for all of it and start the same program. A life is create, one command, end; lowtide
always confirms the end, and the SDK is asked to where it can.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks import machine, page, state
from benchmarks.measure import Comparison, Skipped, interleave, timed
from benchmarks.sdks import PROGRAM, PROVIDERS, SAID, Compared

ROOT = Path(__file__).parent.parent
NAMES = ("life", "exec", "parallel", "transfer", "ending")
_TOGETHER = 25
"""So many are made at once before they end together."""


def measured(provider: str, *options: str) -> list[dict[str, Any]]:
    """The rows of one provider, measured in a process of its own: it has its own emulator, state and SDK."""
    if importlib.util.find_spec(PROVIDERS[provider].module) is None:
        raise Skipped(f"lowtide[{provider}] is not installed")
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        argv = [sys.executable, "-m", "benchmarks.hosted", provider, "--json", report.name, *options]
        subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
        rows: list[dict[str, Any]] = json.load(report)["results"]
    return [{**row, "name": f"{provider}-{row['name']}"} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosted", description=__doc__)
    parser.add_argument("provider", choices=PROVIDERS)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--crowd", type=int, default=100, help="lives at once")
    parser.add_argument("--ending", type=int, default=200, help="sandboxes that end together")
    parser.add_argument("--rounds", type=int, default=3, help="samples of what takes long")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="lowtide-bench-"))
    os.environ["LOWTIDE_HOME"] = str(home)
    from lowtide.testing import emulator

    rows: list[dict[str, Any]] = []
    try:
        limit = 2 * max(given.crowd, given.ending) + 20
        with emulator(given.provider, plain=True, limit=limit, set_environment=True) as served:
            for row in _rows(served, given, home):
                rows.append({"section": given.provider, **row.as_json()})
                print(page.line(rows[-1]), file=sys.stderr, flush=True)
    finally:
        state.end(home)
    report = {"machine": machine.facts(), "results": rows}
    print(page.tables(report))
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def _rows(served: Any, given: argparse.Namespace, home: Path) -> Any:
    compared = PROVIDERS[given.provider]
    sides = Ours(given.provider), Raw(compared)
    measures: dict[str, Callable[[], Comparison]] = {
        "life": lambda: _lives(sides, compared, given.samples),
        "exec": lambda: _commands(sides, compared, given.samples * 4),
        "parallel": lambda: _crowd(sides, compared, given.crowd, given.rounds),
        "transfer": lambda: _transfers(sides, compared, home, given.megabytes, given.rounds),
        "ending": lambda: _ending(sides, compared, served, given.ending, given.rounds),
    }
    left_out = {"parallel": not compared.at_once, "transfer": compared.transfer is None}
    try:
        for name in given.only:
            if not left_out.get(name):
                yield measures[name]()
    finally:
        for side in sides:
            side.close()


class Side:
    """One way of doing it, on one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def timed(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> float:
        return timed(lambda: self.run(work()))

    async def life(self) -> None:
        box = await self.create()
        await self.command(box)
        await self.end(box)

    async def crowd(self, count: int) -> None:
        await asyncio.gather(*(self.life() for _ in range(count)))

    async def used(self, count: int) -> list[Any]:
        """So many boxes, each with a command behind it: all of them are up, and reached."""
        boxes: list[Any] = []
        for start in range(0, count, _TOGETHER):
            boxes += await asyncio.gather(
                *(self._used() for _ in range(start, min(start + _TOGETHER, count)))
            )
        return boxes

    async def _used(self) -> Any:
        box = await self.create()
        await self.command(box)
        return box

    async def end_all(self, boxes: list[Any]) -> None:
        await asyncio.gather(*(self.end(box) for box in boxes))

    async def create(self) -> Any:
        raise NotImplementedError

    async def command(self, box: Any) -> None:
        raise NotImplementedError

    async def end(self, box: Any) -> None:
        raise NotImplementedError

    async def transfer(self, box: Any, source: Path, back: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._loop.close()


class Ours(Side):
    """Through lowtide."""

    def __init__(self, provider: str) -> None:
        super().__init__()
        self._provider = provider

    async def create(self) -> Any:
        from lowtide import Sandbox

        return await Sandbox.run(provider=self._provider)

    async def command(self, box: Any) -> None:
        assert (await box.exec([PROGRAM, SAID])).stdout == f"{SAID}\n"

    async def end(self, box: Any) -> None:
        await box.stop()

    async def transfer(self, box: Any, source: Path, back: Path) -> None:
        await box.upload(source, "/tmp/file")
        await box.download("/tmp/file", back)


class Raw(Side):
    """Through the service's SDK."""

    def __init__(self, compared: Compared) -> None:
        super().__init__()
        self._sdk = compared.sdk()
        self.run(self._sdk.open())
        self.create, self.command, self.end = self._sdk.create, self._sdk.command, self._sdk.end  # type: ignore[method-assign]

    async def transfer(self, box: Any, source: Path, back: Path) -> None:
        await self._sdk.upload(box, source, "/tmp/file")
        with back.open("wb") as file:
            async for chunk in self._sdk.download(box, "/tmp/file"):
                file.write(chunk)

    def close(self) -> None:
        self.run(self._sdk.close())
        super().close()


Sides = tuple[Ours, Raw]


def _lives(sides: Sides, compared: Compared, samples: int) -> Comparison:
    ours, raw = sides
    taken = interleave(lambda: ours.timed(ours.life), lambda: raw.timed(raw.life), samples=samples)
    return _row("life", "create, one command, end", compared, taken, compared.life, compared.ends)


def _commands(sides: Sides, compared: Compared, samples: int) -> Comparison:
    """The first command of a box brings the program in, and the second opens its channel: both come before."""
    ours, raw = sides
    [mine], [theirs] = ours.run(ours.used(1)), raw.run(raw.used(1))
    taken = interleave(
        lambda: ours.timed(lambda: ours.command(mine)),
        lambda: raw.timed(lambda: raw.command(theirs)),
        samples=samples,
    )
    ours.run(ours.end(mine))
    raw.run(raw.end(theirs))
    return _row("exec", "a later command", compared, taken, compared.exec)


def _crowd(sides: Sides, compared: Compared, count: int, rounds: int) -> Comparison:
    ours, raw = sides
    taken = interleave(
        lambda: ours.timed(lambda: ours.crowd(count)),
        lambda: raw.timed(lambda: raw.crowd(count)),
        samples=rounds,
        warm_up=1,
    )
    what = f"{count} at once: create, one command, end"
    return _row("parallel", what, compared, taken, compared.life, compared.ends)


def _transfers(sides: Sides, compared: Compared, home: Path, megabytes: int, rounds: int) -> Comparison:
    ours, raw = sides
    source, back = home / "source", home / "back"
    source.write_bytes(os.urandom(1_000_000) * megabytes)
    [mine], [theirs] = ours.run(ours.used(1)), raw.run(raw.used(1))

    def checked(side: Side, box: Any) -> float:
        took = side.timed(lambda: side.transfer(box, source, back))
        assert back.stat().st_size == megabytes * 1_000_000
        back.unlink()
        return took

    taken = interleave(lambda: checked(ours, mine), lambda: checked(raw, theirs), samples=rounds, warm_up=1)
    ours.run(ours.end(mine))
    raw.run(raw.end(theirs))
    return _row("transfer", f"{megabytes} MB up and down", compared, taken, compared.transfer)


def _ending(sides: Sides, compared: Compared, served: Any, count: int, rounds: int) -> Comparison:
    """Against the clock. The SDK's time, where it can end many at once, is what the emulator itself takes for it."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, into in zip(sides if compared.at_once else sides[:1], taken, strict=False):
            boxes = side.run(side.used(count))
            served.faults.add("kill-hangs", seconds=0.1, count=None)
            into.append(side.timed(lambda side=side, boxes=boxes: side.end_all(boxes)))  # type: ignore[misc]
            served.faults.clear()
    what = f"{count} end together, each end taking 100 ms"
    against = compared.against if compared.at_once else "the clock"
    return Comparison(
        name="ending",
        what=what,
        against=f"{against} {compared.ends}".rstrip(),
        limit=None,
        at_most=Compared.ENDING_MS,
        unit="ms",
        ours=tuple(taken[0]),
        raw=tuple(taken[1]),
        details={},
    )


def _row(
    name: str,
    what: str,
    compared: Compared,
    taken: tuple[tuple[float, ...], tuple[float, ...]],
    limit: float | None,
    ends: str = "",
) -> Comparison:
    return Comparison(
        name=name,
        what=what,
        against=f"{compared.against} {ends}".rstrip(),
        limit=limit,
        unit="ms",
        ours=taken[0],
        raw=taken[1],
        details={},
    )


if __name__ == "__main__":
    main()
