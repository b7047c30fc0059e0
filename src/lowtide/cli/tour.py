"""The story `lowtide demo` tells: what happens, when, and the proof at the end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

from lowtide import isolated
from lowtide.cli import exit_codes
from lowtide.cli.evidence import Evidence
from lowtide.cli.guarding import ask_guardian
from lowtide.cli.text import clean
from lowtide.defaults import default_provider
from lowtide.engine import engine
from lowtide.errors import LowtideError, SandboxFailedError
from lowtide.lifecycle.lease import LeaseState
from lowtide.lifecycle.leases import lifecycle
from lowtide.machine import home
from lowtide.operation import results
from lowtide.providers import registry
from lowtide.providers.base import Capability, Provider
from lowtide.providers.optional import Snapshots
from lowtide.sandbox import Sandbox
from lowtide.session import Session

_PRIMES = """
import time
n, found = 2, []
while len(found) < 5:
    if all(n % p for p in found):
        found.append(n)
        print(n, flush=True)
        time.sleep(0.15)
    n += 1
"""
_WORKER_SANDBOXES = 3


def tour(provider_name: str | None) -> int:
    """Tell the whole story. 0 when nothing was left behind."""
    place = registry.provider(provider_name or default_provider())
    tag = f"demo-{secrets.token_hex(3)}"
    say = _Narrator()
    say.title(f"lowtide demo · provider {place.name} · tag {tag} · state in {home()}")
    evidence = Evidence(place, tag)
    with _snapshots_removed(place) as snapshots:
        _session(say, place, tag, evidence, snapshots)
    _killed_worker(say, place, tag, evidence)
    return _proof(say, evidence)


class _Narrator:
    """Lines with the time since the start; bold only on a terminal."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._chapters = 0

    def title(self, text: str) -> None:
        print(self._bold(text), flush=True)

    def chapter(self, text: str) -> None:
        self._chapters += 1
        print("\n" + self._bold(f"{self._chapters}. {text}"), flush=True)

    def event(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:8.2f} s  {clean(text)}", flush=True)

    def detail(self, text: str) -> None:
        print(f"            {clean(text)}", flush=True)

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._styled else text


def _session(say: _Narrator, place: Provider, tag: str, evidence: Evidence, snapshots: list[str]) -> None:
    say.chapter("A session of three sandboxes, made in parallel")
    with Session({"provider": place.name, "tags": [tag]}) as session:
        boxes = [session.sandbox() for _ in range(3)]
        for box, done in zip(boxes, results([box.exec(["uname", "-n"]) for box in boxes]), strict=True):
            evidence.watch(str(box.sandbox_id))
            say.event(f"sandbox {box.sandbox_id} answers; its host name is {done.stdout.strip()}")
        first, second, third = boxes

        say.chapter("Output streams out while the code runs")
        process = first.exec(["python3", "-c", _PRIMES])
        for chunk in process.stdout:
            for line in chunk.split():
                say.event(f"prime {line}")
        say.event(f"exit code {process.result().returncode}")

        say.chapter("Files go in and out; nothing reaches the outside")
        second.write_file("/root/note.txt", b"written from outside\n").result()
        second.exec(["sh", "-c", "tr a-z A-Z < /root/note.txt > /root/loud.txt"], check=True).result()
        say.event(f"inside, then read back: {second.read_file('/root/loud.txt').result().decode().strip()}")
        _try_to_reach_out(say, second)

        if Capability.SNAPSHOT in place.capabilities:
            say.chapter("A snapshot: the same files in a new sandbox")
            third.write_file("/root/state.txt", b"work worth keeping\n").result()
            snapshot = third.snapshot().result()
            snapshots.append(snapshot)
            say.event(f"snapshot {snapshot}")
            copy = session.sandbox(snapshot=snapshot)
            text = copy.read_file("/root/state.txt").result().decode().strip()
            evidence.watch(str(copy.sandbox_id))
            say.event(f"a sandbox made from it reads: {text}")
        say.event("leaving the session ends all of them")
    say.event("session closed")


def _try_to_reach_out(say: _Narrator, box: Sandbox) -> None:
    """What untrusted code would try first: our state on disk, our environment, our files."""
    name = f"lowtide-demo-{secrets.token_hex(4)}"
    script = f"touch /usr/{name} && echo written; cat {home()}/ledger.db; env | grep -c LOWTIDE"
    told = box.exec(["sh", "-c", script]).result()
    written = "wrote" if "written" in told.stdout else "could not write"
    here = "is there too!" if os.path.exists(f"/usr/{name}") else "has no such file"
    say.event(f"inside it {written} /usr/{name}; this machine's own /usr {here}")
    say.event(f"inside it tried to read our ledger: {told.stderr.strip().rpartition(': ')[2] or 'it could!'}")


def _killed_worker(say: _Narrator, place: Provider, tag: str, evidence: Evidence) -> None:
    say.chapter("A worker is killed with -9: no exit hook, no signal handler, no chance to clean up")
    worker = subprocess.Popen(
        isolated.command("lowtide.cli.tour_worker", place.name, tag, evidence.marker, str(_WORKER_SANDBOXES)),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert worker.stdout is not None
        made = _first_line(worker.stdout, 60.0)
        if made is None:
            raise SandboxFailedError("the demo's worker could not make its sandboxes", reason="worker")
        ids = json.loads(made)
        for sandbox_id in ids:
            evidence.watch(sandbox_id)
        say.event(
            f"worker {worker.pid} made {len(ids)} sandboxes; {evidence.processes()} of its processes run in them"
        )
        os.kill(worker.pid, signal.SIGKILL)
        killed_at = time.time()
        worker.wait()
        say.event(f"kill -9 {worker.pid}")
    finally:
        worker.kill()
        worker.wait()
    guardian = ask_guardian()
    if guardian["running"]:
        say.event(f"the guardian (process {guardian['pid']}) watched the worker and takes over:")
    for at, text in _aftermath(tag, worker.pid, killed_at, 60.0):
        say.detail(f"+{max(0.0, at - killed_at):.3f} s  {text}")


def _first_line(stream: IO[str], seconds: float) -> str | None:
    ready, _, _ = select.select([stream], [], [], seconds)
    return (stream.readline() or None) if ready else None


def _aftermath(tag: str, pid: int, killed_at: float, seconds: float) -> list[tuple[float, str]]:
    """Wait until every lease of the killed worker is gone; what the ledger wrote down about it, in order."""
    deadline = time.monotonic() + seconds
    while True:
        leases = engine().run(lifecycle().leases(states=list(LeaseState), tags=(tag,)))
        left = [lease for lease in leases if lease.owner.pid == pid and lease.state is not LeaseState.GONE]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    lines = []
    for lease in leases:
        if lease.owner.pid != pid:
            continue
        for line in engine().run(lifecycle().ledger.history(lease.lease_id)):
            if line.at >= killed_at:
                why = f": {line.why}" if line.why else ""
                lines.append((line.at, f"{lease.sandbox_id} {line.after}, by process {line.pid}{why}"))
    return sorted(lines)


def _proof(say: _Narrator, evidence: Evidence) -> int:
    say.chapter("What is left")
    clean_everywhere = True
    for what, left, total in evidence.left():
        say.event(f"{what}: {left} left of {total}")
        clean_everywhere = clean_everywhere and left == 0
    say.event(
        "nothing is left behind" if clean_everywhere else "something is left behind: `lowtide sweep` ends it"
    )
    return exit_codes.OK if clean_everywhere else exit_codes.ERROR


@contextlib.contextmanager
def _snapshots_removed(place: Provider) -> Iterator[list[str]]:
    """Snapshots live until somebody deletes them; the tour deletes its own."""
    made: list[str] = []
    try:
        yield made
    finally:
        for snapshot in made:
            if isinstance(place, Snapshots):
                with contextlib.suppress(LowtideError):
                    engine().run(place.delete_snapshot(snapshot))
