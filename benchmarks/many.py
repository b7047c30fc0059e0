"""A thousand local sandboxes alive at once, against ten: does each of them cost what one of ten does?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import memory
from benchmarks.measure import Comparison, timed
from lowtide import Sandbox, Session

FEW = 10
ROUNDS = 10
"""How often the few are made anew: as many samples as the last hundred of the many."""
STRAIGHT = 1.3
"""Per sandbox, at most so much more than with few."""


@dataclass(frozen=True, slots=True)
class _Measured:
    created: tuple[float, ...]
    """The last of them, while the others live."""
    executed: tuple[float, ...]
    memory: float
    """Of each on average, with its share of what lowtide's own processes grew by."""


def against_ten(home: Path, count: int) -> list[Comparison]:
    with Sandbox.run(provider="local") as first:  # builds the shared layer, starts the guardian
        first.exec(["true"]).result()
        few = [_alive(home, FEW) for _ in range(ROUNDS)]
        many = _alive(home, count)
    rows = (
        ("create", "ms", many.created, tuple(value for one in few for value in one.created)),
        ("one command in each", "ms", many.executed, tuple(value for one in few for value in one.executed)),
        ("host memory each", "kB", (many.memory,), (statistics.median(one.memory for one in few),)),
    )
    return [
        Comparison(
            name=f"many: {what}",
            what=f"{count} sandboxes alive at once: {what}",
            against=f"{FEW} alive at once",
            limit=STRAIGHT,
            unit=unit,
            ours=ours,
            raw=raw,
            details={"sandboxes": count},
        )
        for what, unit, ours, raw in rows
    ]


def _execute(sandbox: Sandbox) -> None:
    sandbox.exec(["true"]).result()


def _alive(home: Path, count: int) -> _Measured:
    before = memory.own_processes(home)
    with Session({"provider": "local"}) as session:
        sandboxes: list[Sandbox] = []

        def create() -> None:
            sandbox = session.sandbox()
            sandbox.start()
            sandbox.wait()
            sandboxes.append(sandbox)

        created = [timed(create) for _ in range(count)]
        executed = [timed(partial(_execute, one)) for one in sandboxes]
        grown = max(0.0, memory.own_processes(home) - before)
        each = sum(memory.of_each(home, sandboxes)) / count + grown / count
    return _Measured(tuple(created[-100:]), tuple(executed), each)
