"""lowtide on E2B against E2B's own async SDK, on the same emulator, in the same run: ``python -m benchmarks.e2b``.

Both sides go through the same background loop, so that the hand-over costs both the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, page, state
from benchmarks.measure import Comparison, interleave, timed

ROOT = Path(__file__).parent.parent
SIZE = 100 * 1000 * 1000
TEMPLATE = "base"
NAMES = ("life", "exec", "parallel", "transfer", "ending")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.e2b", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=100, help="sandboxes at once")
    parser.add_argument("--ending", type=int, default=200, help="sandboxes that end together")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "e2b.json")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="lowtide-bench-"))
    os.environ["LOWTIDE_HOME"] = str(home / "home")
    (home / "home").mkdir(mode=0o700)
    from lowtide.engine import engine
    from lowtide.providers import registry
    from lowtide.testing import emulator

    rows = []
    try:
        with emulator("e2b", plain=True, limit=512, set_environment=True) as emulators:
            measures: dict[str, Callable[[], Comparison]] = {
                "life": lambda: whole_life(arguments.samples),
                "exec": lambda: one_command(arguments.samples),
                "parallel": lambda: at_once(arguments.parallel, max(3, arguments.samples // 20)),
                "transfer": lambda: transfer(home, max(5, arguments.samples // 10)),
                "ending": lambda: ending(emulators, arguments.ending, 3),
            }
            for name in arguments.only or NAMES:
                print(f"measuring {name} ...", file=sys.stderr, flush=True)
                rows.append({"section": "E2B", **measures[name]().as_json()})
                print(page.line(rows[-1]), file=sys.stderr, flush=True)
            engine().run(registry.aclose(), timeout=60.0)
    finally:
        state.end(home)
    report = {"machine": machine.facts(), "results": rows}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(page.tables(report))
    print(f"\nwritten to {arguments.json}")


def whole_life(samples: int) -> Comparison:
    from lowtide import Sandbox

    def ours() -> None:
        with Sandbox.run(provider="e2b") as box:
            box.exec(["/bin/true"]).result()

    mine, theirs = interleave(
        lambda: timed(ours), lambda: timed(lambda: _run(_raw_life())), samples=samples, warm_up=5
    )
    return _row("life", "create, one command, end", 1.05, mine, theirs)


def one_command(samples: int) -> Comparison:
    from lowtide import Sandbox

    raw = _run(_raw_create())
    with Sandbox.run(provider="e2b") as box:
        mine, theirs = interleave(
            lambda: timed(lambda: box.exec(["/bin/true"]).result()),
            lambda: timed(lambda: _run(raw.commands.run("/bin/true"))),
            samples=samples * 2,
            warm_up=5,
        )
    _run(raw.kill())
    return _row("exec", "one command", 1.03, mine, theirs)


def at_once(count: int, samples: int) -> Comparison:
    from lowtide import Sandbox

    async def life() -> None:
        async with Sandbox.run(provider="e2b") as box:
            await box.exec(["/bin/true"])

    async def many(one: Callable[[], Any]) -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    mine, theirs = interleave(
        lambda: timed(lambda: asyncio.run(many(life))),
        lambda: timed(lambda: _run(many(_raw_life))),
        samples=samples,
        warm_up=1,
    )
    return _row("parallel", f"{count} sandboxes at once: create, one command, end", 1.05, mine, theirs)


def transfer(home: Path, samples: int) -> Comparison:
    from lowtide import Sandbox

    source, back = home / "source", home / "back"
    source.write_bytes(os.urandom(1_000_000) * (SIZE // 1_000_000))
    raw = _run(_raw_create())

    async def raw_both() -> None:
        with source.open("rb") as file:
            await raw.files.write("/tmp/file", file)
        with back.open("wb") as file:
            async for chunk in await raw.files.read("/tmp/file", format="stream"):
                file.write(chunk)

    with Sandbox.run(provider="e2b") as box:

        def ours() -> None:
            box.upload(source, "/tmp/file").result()
            box.download("/tmp/file", back).result()

        def checked(work: Callable[[], object]) -> float:
            took = timed(work)
            assert back.stat().st_size == SIZE
            back.unlink()
            return took

        mine, theirs = interleave(
            lambda: checked(ours), lambda: checked(lambda: _run(raw_both())), samples=samples, warm_up=1
        )
    _run(raw.kill())
    return _row("transfer", "100 MB up and down", 1.1, mine, theirs)


def ending(emulators: Any, count: int, samples: int) -> Comparison:
    """Against the clock, not against the SDK: all of them end together, each kill taking 100 ms."""
    from lowtide import Sandbox, results

    took = []
    for _ in range(samples):
        boxes = [Sandbox(provider="e2b") for _ in range(count)]
        for start in range(0, count, 50):
            results([box.start() for box in boxes[start : start + 50]])
        fault = emulators.faults.add("kill-hangs", seconds=0.1, count=None)
        took.append(timed(lambda boxes=boxes: results([box.stop() for box in boxes])))  # type: ignore[misc]
        emulators.admin("DELETE", f"/faults/{fault}")
    return Comparison(
        name="ending",
        what=f"{count} sandboxes end together, each kill taking 100 ms",
        against="a limit",
        limit=None,
        unit="ms",
        ours=tuple(took),
        raw=(),
        details={},
        at_most=1500.0,
    )


async def _raw_create() -> Any:
    from e2b import AsyncSandbox

    return await AsyncSandbox.create(TEMPLATE, timeout=300)


async def _raw_life() -> None:
    box = await _raw_create()
    await box.commands.run("/bin/true")
    await box.kill()


def _run(work: Any) -> Any:
    from lowtide.engine import engine

    return engine().run(work)


def _row(
    name: str, what: str, limit: float, mine: tuple[float, ...], theirs: tuple[float, ...]
) -> Comparison:
    return Comparison(
        name=name,
        what=what,
        against="E2B's async SDK",
        limit=limit,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )


if __name__ == "__main__":
    main()
