"""What a living sandbox costs in memory: proportional set size of all its processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.measure import Comparison
from benchmarks.raw import RawBubblewrap
from lowtide import Sandbox, Session


def alive_at_once(home: Path, count: int) -> Comparison:
    mine, own_growth = _ours(home, count)
    theirs = _raw(home, count)
    # What lowtide's own processes grew by belongs to the sandboxes that made them grow.
    mine = tuple(value + own_growth / count for value in mine)
    return Comparison(
        name="memory",
        what=f"{count} sandboxes alive at once: host memory each",
        against="one bubblewrap process pair",
        limit=1.3,
        unit="kB",
        ours=mine,
        raw=theirs,
        details={"own_processes_grew_kb": round(own_growth), "sandboxes": count},
    )


def _ours(home: Path, count: int) -> tuple[tuple[float, ...], float]:
    with Sandbox.run(provider="local") as first:
        first.exec(["true"]).result()
        before = _own_processes(home)
        with Session({"provider": "local"}) as session:
            sandboxes = [session.sandbox() for _ in range(count)]
            for sandbox in sandboxes:
                sandbox.start()
            for sandbox in sandboxes:
                sandbox.wait()
            after = _own_processes(home)
            tree = _children()
            from lowtide.providers.local.place import Place

            samples = []
            for sandbox in sandboxes:
                outer, _ = Place(home / "local" / "sandboxes" / str(sandbox.sandbox_id)).processes()
                assert outer is not None
                samples.append(_pss_of_tree(outer.pid, tree))
    return tuple(samples), max(0.0, after - before)


def _raw(home: Path, count: int) -> tuple[float, ...]:
    bubblewrap = RawBubblewrap(home)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(
                subprocess.Popen(
                    bubblewrap.argv("sleep", "infinity"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            )
        # Ready when each has its inner process and that has its command.
        deadline = time.monotonic() + 120
        while any(len(_descendants(process.pid, tree)) < 3 for process in running for tree in (_children(),)):
            if time.monotonic() > deadline:
                raise SystemExit("the raw bubblewrap processes did not come up")
            time.sleep(0.2)
        tree = _children()
        return tuple(_pss_of_tree(process.pid, tree) for process in running)
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        bubblewrap.close()


def _own_processes(home: Path) -> float:
    """PSS of this process, its helpers and the guardian of this home."""
    mine = {os.getpid()}
    tree = _children()
    mark = os.fsencode(home)
    for pid in _all_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read():
                    mine.add(pid)
        except OSError:
            continue
    for pid in list(mine):
        mine.update(child for child in tree.get(pid, ()) if _is_python(child))
    return sum(_pss(pid) for pid in mine)


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False


def _pss_of_tree(pid: int, tree: dict[int, list[int]]) -> float:
    return sum(_pss(member) for member in _descendants(pid, tree))


def _descendants(pid: int, tree: dict[int, list[int]]) -> list[int]:
    found = [pid]
    for member in found:
        found.extend(tree.get(member, ()))
    return found


def _children() -> dict[int, list[int]]:
    tree: dict[int, list[int]] = defaultdict(list)
    for pid in _all_pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                tree[int(file.read().rpartition(b")")[2].split()[1])].append(pid)
        except OSError:
            continue
    return tree


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _pss(pid: int) -> float:
    """In kB; 0 for one that has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return float(line.split()[1])
    except PermissionError:
        raise SystemExit("reading the memory of sandboxed processes needs root here") from None
    except OSError:
        return 0.0
    return 0.0
