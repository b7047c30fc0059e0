"""How long a large file, and a tree of many small ones, take into a sandbox and out again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.measure import Comparison, interleave, timed
from lowtide import Sandbox

SIZE = 300 * 1000 * 1000
FOLDERS, EACH = 200, 100


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
    source, copy, back = (home / name for name in ("source", "copy", "back"))
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
                ins.append(timed(lambda: sandbox.upload(source, "/opt/tree").result()))
                outs.append(timed(lambda: sandbox.download("/opt/tree", back).result()))
                assert sum(1 for path in back.rglob("*") if path.is_file()) == FOLDERS * EACH
                shutil.rmtree(back)
                sandbox.remove("/opt/tree", recursive=True).result()
                return ins[-1] + outs[-1]

            def raw() -> float:
                there, again = (timed(lambda a=a, b=b: _tar(a, b)) for a, b in ((source, copy), (copy, back)))
                shutil.rmtree(copy)
                shutil.rmtree(back)
                return there + again

            mine, theirs = interleave(ours, raw, samples=samples, warm_up=1)
    finally:
        for path in (source, copy, back):
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
