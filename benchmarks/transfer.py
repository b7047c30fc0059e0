"""How long a large file, and a tree of many small ones, take into a sandbox and out again."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.measure import Comparison, interleave, timed
from lowtide import Sandbox

SIZE = 300 * 1000 * 1000
FOLDERS, EACH = 200, 100
_TREES = 7
"""As many are made, and none is removed before the end: ext4 searches for long after many files were removed."""


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


def tree_in_and_out(home: Path, samples: int) -> Comparison:
    source, back = home / "source", home / "back"
    back.mkdir()
    names = (back / f"raw-{number}" for number in itertools.count())
    for folder in range(FOLDERS):
        (source / str(folder)).mkdir(parents=True)
        for file in range(EACH):
            (source / str(folder) / str(file)).write_bytes(b"x" * 20 * file)
    ins: list[float] = []
    outs: list[float] = []
    try:
        with Sandbox.run(provider="local") as sandbox:
            sandbox.wait()

            def ours() -> float:
                inside, out = f"/opt/tree-{len(ins)}", back / f"ours-{len(ins)}"
                ins.append(timed(lambda: sandbox.upload(source, inside).result()))
                outs.append(timed(lambda: sandbox.download(inside, out).result()))
                assert sum(1 for path in out.rglob("*") if path.is_file()) == FOLDERS * EACH
                return ins[-1] + outs[-1]

            def raw() -> float:
                there, again = next(names), next(names)
                return timed(lambda: _tar(source, there)) + timed(lambda: _tar(there, again))

            mine, theirs = interleave(ours, raw, samples=min(samples, _TREES), warm_up=1)
    finally:
        for path in (source, back):
            shutil.rmtree(path, ignore_errors=True)
    return Comparison(
        name="tree",
        what=f"{FOLDERS * EACH:,} small files in and out",
        against="`tar \\| tar` there and back",
        limit=3.0,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={
            "in_ms": round(sorted(ins)[len(ins) // 2], 1),
            "out_ms": round(sorted(outs)[len(outs) // 2], 1),
        },
    )


def _tar(source: Path, target: Path) -> None:
    target.mkdir()
    packing = subprocess.Popen(["tar", "-C", str(source), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-C", str(target), "-x"], stdin=packing.stdout, check=True)
    assert packing.wait() == 0
