"""What a living sandbox costs in memory: proportional set size of all its processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks import processes
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
        before = own_processes(home)
        with Session({"provider": "local"}) as session:
            sandboxes = [session.sandbox() for _ in range(count)]
            for sandbox in sandboxes:
                sandbox.start()
            for sandbox in sandboxes:
                sandbox.wait()
            after = own_processes(home)
            samples = of_each(home, sandboxes)
    return samples, max(0.0, after - before)


def of_each(home: Path, sandboxes: Iterable[Sandbox]) -> tuple[float, ...]:
    """PSS of all processes of each of these, in kB."""
    from lowtide.providers.local.sandbox_directory import SandboxDirectory

    tree = processes.children()
    samples = []
    for sandbox in sandboxes:
        outer, _ = SandboxDirectory(home / "local" / "sandboxes" / str(sandbox.sandbox_id)).processes()
        assert outer is not None
        samples.append(_pss_of_tree(outer.pid, tree))
    return tuple(samples)


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
        processes.until_up(running)
        tree = processes.children()
        return tuple(_pss_of_tree(process.pid, tree) for process in running)
    finally:
        processes.end(running)
        bubblewrap.close()


def own_processes(home: Path) -> float:
    """PSS of this process, its helpers and the guardian of this home."""
    mine = {os.getpid()}
    tree = processes.children()
    mark = os.fsencode(home)
    for pid in processes.pids():
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
    return sum(_pss(member) for member in processes.descendants(pid, tree))


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
