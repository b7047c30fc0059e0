"""lowtide on CoreWeave against CoreWeave's own SDK, on the same emulator, in the same run: ``python -m benchmarks.coreweave``."""

from __future__ import annotations

import argparse
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
NAMES = ("life", "exec", "ending")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coreweave", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--ending", type=int, default=200, help="sandboxes that end together")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "coreweave.json")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="lowtide-bench-"))
    os.environ["LOWTIDE_HOME"] = str(home / "home")
    (home / "home").mkdir(mode=0o700)
    from lowtide.engine import engine
    from lowtide.providers import registry
    from lowtide.testing import emulator

    rows = []
    try:
        with emulator("coreweave", plain=True, limit=512, set_environment=True) as served:
            measures: dict[str, Callable[[], Comparison]] = {
                "life": lambda: whole_life(given.samples),
                "exec": lambda: one_command(given.samples * 5),
                "ending": lambda: ending(served, given.ending, 3),
            }
            for name in given.only or NAMES:
                print(f"measuring {name} ...", file=sys.stderr, flush=True)
                rows.append({"section": "CoreWeave", **measures[name]().as_json()})
                print(page.line(rows[-1]), file=sys.stderr, flush=True)
            engine().run(registry.aclose(), timeout=60.0)
    finally:
        state.end(home)
    report = {"machine": machine.facts(), "results": rows}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(report, indent=2) + "\n")
    print(page.tables(report))
    print(f"\nwritten to {given.json}")


def whole_life(samples: int) -> Comparison:
    from cwsandbox import Sandbox as Raw

    from lowtide import Sandbox

    def ours() -> None:
        with Sandbox.run(provider="coreweave") as box:
            box.exec(["/bin/true"]).result()

    def raw() -> None:
        with Raw.run() as box:
            box.exec(["/bin/true"]).result()

    mine, theirs = interleave(lambda: timed(ours), lambda: timed(raw), samples=samples, warm_up=3)
    return _row("life", "create, one command, end", 1.05, mine, theirs)


def one_command(samples: int) -> Comparison:
    from cwsandbox import Sandbox as Raw

    from lowtide import Sandbox

    with Raw.run() as raw, Sandbox.run(provider="coreweave") as box:
        mine, theirs = interleave(
            lambda: timed(lambda: box.exec(["/bin/true"]).result()),
            lambda: timed(lambda: raw.exec(["/bin/true"]).result()),
            samples=samples,
            warm_up=5,
        )
    return _row("exec", "a second or later command", 0.9, mine, theirs)


def ending(served: Any, count: int, samples: int) -> Comparison:
    """Against the clock, not against the SDK: all of them end together, each delete taking 100 ms."""
    from lowtide import Sandbox, results

    took = []
    for _ in range(samples):
        boxes = [Sandbox(provider="coreweave") for _ in range(count)]
        for start in range(0, count, 50):
            results([box.start() for box in boxes[start : start + 50]])
        for box in boxes:
            box.wait()
        fault = served.faults.add("kill-hangs", seconds=0.1, count=None)
        took.append(timed(lambda boxes=boxes: results([box.stop() for box in boxes])))  # type: ignore[misc]
        served.admin("DELETE", f"/faults/{fault}")
    return Comparison(
        name="ending",
        what=f"{count} sandboxes end together, each delete taking 100 ms",
        against="a limit",
        limit=None,
        unit="ms",
        ours=tuple(took),
        raw=(),
        details={},
        at_most=1500.0,
    )


def _row(
    name: str, what: str, limit: float, mine: tuple[float, ...], theirs: tuple[float, ...]
) -> Comparison:
    return Comparison(
        name=name,
        what=what,
        against="CoreWeave's SDK",
        limit=limit,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )


if __name__ == "__main__":
    main()
