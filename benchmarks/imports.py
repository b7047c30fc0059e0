"""How long the import takes, in fresh interpreters."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from benchmarks.measure import Comparison, Skipped, interleave

_CODE = "{before}import time; start = time.perf_counter(); {statement}; print((time.perf_counter() - start) * 1000)"


def import_sandbox(samples: int) -> Comparison:
    """Only the import itself is timed: the start of the interpreter would make any ratio look good."""
    mine, theirs = interleave(
        lambda: _import("from lowtide import Sandbox"), lambda: _import("import asyncio"), samples=samples
    )
    return Comparison(
        name="import",
        what="`from lowtide import Sandbox`",
        against="`import asyncio`, both in fresh interpreters",
        limit=1.5,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )


def import_beside(sdk: str, samples: int) -> Comparison:
    """What an installed SDK adds to the import: nothing, as long as nothing imports it."""
    if importlib.util.find_spec(sdk) is None:
        raise Skipped(f"lowtide[{sdk}] is not installed")
    statement = "from lowtide import Sandbox"
    mine, theirs = interleave(
        lambda: _import(statement),
        lambda: _import(statement, before=f"import sys; sys.modules[{sdk!r}] = None; "),
        samples=samples,
    )
    return Comparison(
        name=f"{sdk}-import",
        what=f"`from lowtide import Sandbox` with the `{sdk}` package installed",
        against="the same with that package out of reach",
        limit=1.05,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )


def _import(statement: str, *, before: str = "") -> float:
    code = _CODE.format(statement=statement, before=before)
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )
