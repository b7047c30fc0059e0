"""How long the import takes, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import Comparison, interleave

_CODE = "import time; start = time.perf_counter(); {statement}; print((time.perf_counter() - start) * 1000)"


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


def _import(statement: str) -> float:
    code = _CODE.format(statement=statement)
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )
