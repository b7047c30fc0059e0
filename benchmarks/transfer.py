"""How long a large file takes into a sandbox and out again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.measure import Comparison, interleave, timed
from lowtide import Sandbox

SIZE = 300 * 1000 * 1000


def in_and_out(home: Path, samples: int) -> Comparison:
    source, copy, back = (home / name for name in ("source", "copy", "back"))
    block = os.urandom(1_000_000)
    with source.open("wb") as file:
        for _ in range(SIZE // len(block)):
            file.write(block)
    ins: list[float] = []
    outs: list[float] = []
    try:
        with Sandbox.run(provider="local") as sandbox:
            sandbox.wait()

            def ours() -> float:
                ins.append(timed(lambda: sandbox.upload(source, "/opt/file").result()))
                outs.append(timed(lambda: sandbox.download("/opt/file", back).result()))
                assert back.stat().st_size == SIZE
                back.unlink()
                sandbox.remove("/opt/file").result()
                return ins[-1] + outs[-1]

            def raw() -> float:
                there = timed(lambda: subprocess.run(["cp", str(source), str(copy)], check=True))
                again = timed(lambda: subprocess.run(["cp", str(copy), str(back)], check=True))
                copy.unlink()
                back.unlink()
                return there + again

            mine, theirs = interleave(ours, raw, samples=samples, warm_up=1)
    finally:
        for path in (source, copy, back):
            path.unlink(missing_ok=True)
    return Comparison(
        name="transfer",
        what="300 MB file in and out",
        against="`cp` of the same file",
        limit=2.0,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={
            "in_ms": round(sorted(ins)[len(ins) // 2], 1),
            "out_ms": round(sorted(outs)[len(outs) // 2], 1),
        },
    )
