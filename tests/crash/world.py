"""One world per test: a state directory, a service, a live neighbour, and the account of what is left."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.lifecycle.guardian_link import connect
from lowtide.lifecycle.lease import LeaseState
from lowtide.providers import registry
from lowtide.providers.base import LABEL_PREFIX, Provider
from lowtide.testing.faulty import FaultyService
from tests.crash.environments import Place
from tests.crash.stalls import Stalls

ACTOR = Path(__file__).with_name("actor.py")
PROMISED_SECONDS = 1.0
"""What docs/what-if-my-process-dies.md says of everything a guardian ends: about a second."""
FACTOR = 3.0
"""How many times that a case may take. The machine's own stalls meanwhile are added; see `stalls`."""
OWN_SECONDS = {
    "docker": 10.0,
    "e2b": 5.0,
    "kubernetes": 30.0,
    "daytona": 20.0,
    "modal": 5.0,
    "runloop": 10.0,
    "coreweave": 5.0,
}
"""What a delete takes at the service itself, once it was asked: not of our making, and not fast."""
WINDOW_SECONDS = "5"
"""The create window on providers whose own is a minute: against an engine or emulator of this machine that is plenty."""


@dataclass(slots=True)
class Actor:
    """A process of ours, by its own Popen; in a place of its own it is a descendant of that."""

    process: subprocess.Popen[bytes]
    errors: Path
    placed: bool = False
    lines: list[str] = field(default_factory=list)
    _rest: bytes = b""

    def until(self, word: str, seconds: float = 60.0) -> str:
        """The first line that starts with `word`; lines before it are kept."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self.lines:
                if line.split()[:1] == [word]:
                    return line
            left = deadline - time.monotonic()
            assert left > 0, f"no {word} within {seconds:g} s; said {self.lines}; {self.stacks()}"
            stdout = self.process.stdout
            assert stdout is not None
            if select.select([stdout], [], [], min(left, 1.0))[0]:
                data = os.read(stdout.fileno(), 65536)
                if not data:
                    raise EOFError(f"it ended without {word}; said {self.lines}, exit {self.process.wait()}")
                *whole, self._rest = (self._rest + data).split(b"\n")
                self.lines += [line.decode() for line in whole]

    def stacks(self) -> str:
        """Where its threads are, for somebody who waits in vain."""
        if self.process.poll() is None and not self.placed:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
        return self.errors.read_text(errors="replace")[-6000:]

    def made(self) -> set[str]:
        return {line.split()[1] for line in self.lines if line.startswith("MADE ")}

    def pid(self) -> int:
        """The program's own, as seen from here, once it runs."""
        if not self.placed:
            return self.process.pid
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid = self.process.pid
            while pid:
                if str(ACTOR).encode() in _arguments(pid)[1:2]:
                    return pid
                pid = _only_child(pid)
            time.sleep(0.01)
        raise AssertionError(f"the program did not start; {self.stacks()}")

    def signal(self, number: int) -> None:
        os.kill(self.pid(), number)

    def kill(self) -> None:
        if self.placed and self.process.poll() is None:
            self.signal(signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait()

    def end_place(self) -> None:
        """Kill whatever the program was started through: with a pid namespace all that is in it."""
        self.process.kill()
        self.process.wait()

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def drain(self) -> None:
        """Read what is left to read, after the end."""
        stdout = self.process.stdout
        if stdout is not None and not stdout.closed:
            self.lines += (self._rest + stdout.read()).decode().splitlines()
            stdout.close()


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _only_child(pid: int) -> int:
    """The first process this one has started, or 0: what a place is made of starts one thing each."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except OSError:
        return 0


class World:
    """A home, a service behind the provider, and the actors in it."""

    def __init__(self, directory: Path, provider: str, environment: Mapping[str, str] | None = None) -> None:
        self.home = directory / "h"
        self.home.mkdir(mode=0o700)
        self.provider_name = provider
        self.service = FaultyService(directory / "service")
        self.environ = {
            **os.environ,
            "LOWTIDE_HOME": str(self.home),
            "LOWTIDE_FAULTY_DIR": str(self.service.directory),
            "LOWTIDE_CREATE_WINDOW_SECONDS": WINDOW_SECONDS,
            **(environment or {}),
        }
        for name in ("LOWTIDE_CRASH_AT", "LOWTIDE_GUARDIAN_CRASH_AT", "LOWTIDE_KEEP"):
            self.environ.pop(name, None)
        self.actors: list[Actor] = []
        self.spared: set[str] = set()
        self.bound = PROMISED_SECONDS * FACTOR + OWN_SECONDS.get(provider, 0.0)
        # Where nothing was made, or not yet, only the end of the create window is proof of it.
        own_window = registry.provider_class(provider).traits.create_window_seconds
        self.window = min(own_window, float(WINDOW_SECONDS))
        self.slowest = 0.0
        self.cases = 1

    def start(self, scenario: str, count: int = 2, *, within: Place = (), **environ: str) -> Actor:
        """A scenario of `actor.py`, or the path of a program in its words; in a place of `environments.py`."""
        errors = self.home.parent / f"actor-{len(self.actors)}.err"
        with open(errors, "wb") as file:
            process = subprocess.Popen(
                [*within, sys.executable, str(ACTOR), self.provider_name, scenario, str(count)],
                env={**self.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )
        actor = Actor(process, errors, placed=bool(within))
        self.actors.append(actor)
        return actor

    def start_program(self, text: str, count: int = 2, *, within: Place = (), **environ: str) -> Actor:
        """A program of the case's own, in the words of `actor.py`."""
        path = self.home.parent / f"program-{len(self.actors)}.py"
        path.write_text(textwrap.dedent(text))
        return self.start(str(path), count, within=within, **environ)

    def start_peer(self) -> Actor:
        actor = self.start("peer", 2)
        actor.until("READY")
        self.spared |= self._names(actor.made())
        return actor

    def end_peer(self, actor: Actor) -> None:
        """The neighbour still works, and ends by itself."""
        assert actor.process.stdin is not None
        actor.process.stdin.write(b"\n")
        actor.process.stdin.flush()
        answer = actor.until("ALIVE")
        lost = [line for line in actor.lines if line.startswith("LOST")]
        assert answer == f"ALIVE {len(actor.made())}", f"wrongly ended: {lost}; {self.log()[-3000:]}"
        assert actor.wait() == 0
        self.spared -= self._names(actor.made())

    def _names(self, ids: set[str]) -> set[str]:
        """These sandboxes by every name: not every provider takes the lease's for its own."""
        pairs = self._query("SELECT lease_id, sandbox_id FROM lease")
        return ids | {str(lease) for lease, sandbox in pairs if sandbox in ids}

    # The account.

    def provider(self) -> Provider:
        return registry.provider_class(self.provider_name).connect(self.environ)

    def existing(self) -> set[str]:
        """Everything the provider shows that was made under this world's ledger."""
        if self.provider_name == "faulty":
            return set(self.service.sandboxes())
        return asyncio.run(self._list())

    async def _list(self) -> set[str]:
        provider = self.provider()
        try:
            ledger_id = self.ledger_id()
            if ledger_id is None:  # nobody has come as far as opening it
                return set()
            labels = {LABEL_PREFIX + "ledger": ledger_id}
            return {info.sandbox_id async for info in provider.list(labels)}
        finally:
            await provider.aclose()

    def ledger_id(self) -> str | None:
        found = self._query("SELECT value FROM meta WHERE key='ledger_id'")
        return str(found[0][0]) if found else None

    def rows(self) -> list[tuple[str, str, int]]:
        """(lease id, state, owner's pid) of every row."""
        return [(str(a), str(b), int(c)) for a, b, c in self._query("SELECT lease_id, state, pid FROM lease")]

    def _query(self, query: str) -> list[tuple[Any, ...]]:
        path = self.home / "ledger.db"
        if not path.exists():
            return []
        with sqlite3.connect(path, timeout=20) as db:
            try:
                return db.execute(query).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):
                    raise
                return []  # its maker was killed before the first row could be written

    def open_rows(self) -> list[tuple[str, str, int]]:
        settled = {LeaseState.GONE, LeaseState.HANDED_OVER}
        return [row for row in self.rows() if row[1] not in settled and row[0] not in self.spared]

    def wait_until_clean(self, seconds: float | None = None) -> float:
        """Nothing exists but the neighbour's, every other row is settled. How long that took.

        What exists when the wait begins has to go within the promise; what a request may still make, and the
        row of one that has made nothing, within the create window and the promise. Or all of it in `seconds`.
        """
        started, stalls = time.monotonic(), Stalls(self.home)
        seen = self.existing() - self.spared
        while True:
            left, rows = self.existing() - self.spared, self.open_rows()
            took = time.monotonic() - started
            if not left and not rows:
                self.slowest = max(self.slowest, took)
                return took
            bound = seconds if seconds is not None else self.bound + (0.0 if left & seen else self.window)
            stalled = stalls.seconds()
            assert took < bound + stalled, (
                f"leaked after {took:.2f} s, of which the machine stalled {stalled:.2f} s"
                f" (bound {bound:g} s): {sorted(left)}; rows {rows}; {self.log()[-2000:]}"
            )
            stalls.sleep(0.03)

    def check_rows(self, ids: set[str]) -> None:
        """Every sandbox somebody was told about has its row."""
        known = {row[0] for row in self.rows()}
        known |= {str(row[0]) for row in self._query("SELECT sandbox_id FROM lease") if row[0]}
        assert ids <= known, f"rows lost: {ids - known}"

    # The guardian.

    def until_struck(self, seconds: float = 30.0) -> None:
        """Until a guardian was killed at the step that ``LOWTIDE_GUARDIAN_CRASH_AT`` names, with the mark `struck`."""
        deadline = time.monotonic() + seconds
        while not (self.home / "struck").exists():
            assert time.monotonic() < deadline, "no guardian has come to the step it was to be killed at"
            time.sleep(0.02)

    def guardian(self, seconds: float = 15.0) -> int:
        """Its pid, once it answers."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            link = connect(self.home)
            if link is not None:
                with link:
                    link.settimeout(5)
                    link.sendall(b'{"status": true}\n')
                    data = link.recv(65536)
                if data:
                    return int(json.loads(data)["pid"])
            time.sleep(0.02)
        raise AssertionError(f"no guardian within {seconds:g} s; {self.log()[-2000:]}")

    def kill_guardian(self) -> int:
        pid = self.guardian()
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}/stat"):
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    break
            time.sleep(0.005)
        return pid

    def log(self) -> str:
        path = self.home / "guardian.log"
        return path.read_text() if path.exists() else ""

    def sweep(self) -> None:
        """What the next lowtide process or `lowtide sweep` does."""
        program = "import sys; from lowtide.cli import main; sys.argv[1:] = ['sweep', '--provider', sys.argv[1]]; main()"
        subprocess.run(
            [sys.executable, "-c", program, self.provider_name],
            env=self.environ,
            check=True,
            capture_output=True,
            timeout=120,
        )

    def close(self) -> None:
        failed = False
        for actor in self.actors:
            if actor.process.poll() is None:
                failed = True
                actor.kill()
            for stream in (actor.process.stdin, actor.process.stdout):
                if stream is not None:
                    stream.close()
        if failed:  # and has said so; what it leaves must not be held against the others
            self.spared = set()
            try:
                self.wait_until_clean(10)
            except AssertionError:
                self.sweep()
