"""Who in the guardian talks to a provider: light ones in its own process, heavy ones in a worker.

A provider that imports an SDK would make the guardian ten times its size for something that is
rarely needed. Such work goes to a worker process per account: started on demand with the account's
environment, fed with lease ids on its standard input, gone when idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lowtide import isolated
from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    MissingDependencyError,
    SandboxGone,
    SandboxNotFoundError,
)
from lowtide.lifecycle import ask_provider
from lowtide.lifecycle.ask_provider import Sighting, Testimony
from lowtide.lifecycle.end import end_for_another
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import Lease, LeaseState, Outcome
from lowtide.lifecycle.provider_lifetime import renew_lease
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers import registry
from lowtide.providers.base import Provider

log = logging.getLogger("lowtide.guardian")

T = TypeVar("T")

IDLE_SECONDS = 30.0
ANSWER_SECONDS = 180.0
"""More than any job may take: a worker that has not answered by then never will."""
LEAVE_SECONDS = 3.0
"""For the workers to end when the guardian leaves."""


class NoCredentials(LowtideError):
    """There is nothing here to ask this account with. Another process may have it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to connect to one account. Only ever in memory."""

    name: str
    account: str
    environ: dict[str, str] = field(repr=False)


class Workers:
    """The guardian's access to providers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, str], Credentials] = {}
        self._light: dict[tuple[str, str], Provider] = {}
        self._retired: list[Provider] = []
        self._workers: dict[tuple[str, str], _Worker] = {}

    def learn(self, credentials: Credentials) -> bool:
        """An owner told how it connects. True where that is new: then nobody works with the old ones any more."""
        key = (credentials.name, credentials.account)
        if self._known.get(key) == credentials:
            return False
        self._known.pop(key, None)
        self._known[key] = credentials  # the newest are the last
        if key in self._light:
            self._retired.append(self._light.pop(key))
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.retire()
        return True

    def outlives_machine(self, lease: Lease) -> bool:
        """Whether its sandbox may still run after a restart of this machine."""
        try:
            return registry.provider_class(lease.provider).traits.outlives_machine
        except LowtideError:  # a provider that is not installed here
            return True

    async def with_any_key(self, lease: Lease, work: Callable[[str], Awaitable[T]]) -> T:
        """Do it with the lease's own account; where that is refused, with the others of its provider, newest first.

        A key may have been exchanged: then the new one counts as another account until it shows the sandbox.
        """
        told = [account for name, account in reversed(self._known) if name == lease.provider]
        refusal: LowtideError | None = None
        for account in (lease.account, *(one for one in told if one != lease.account)):
            try:
                return await work(account)
            except (NoCredentials, AuthenticationError) as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal if isinstance(refusal, NoCredentials) else NoCredentials(str(refusal)) from refusal

    def light(self, lease: Lease, account: str | None = None) -> Provider | None:
        """A connected provider for this lease, if it is one the guardian may load itself."""
        key = (lease.provider, account or lease.account)
        if key in self._light:
            return self._light[key]
        if not registry.provider_class(lease.provider).traits.light:
            return None
        self._light[key] = connect(*key, self._environ(key))
        return self._light[key]

    async def end(self, lease: Lease, decision: Decision, account: str | None = None) -> tuple[Outcome, str]:
        job = {"end": lease.lease_id, "fate": decision.fate.value, "why": decision.why}
        answer = await self._ask(lease, job, account)
        return Outcome(answer["outcome"]), str(answer["why"])

    async def look(self, lease: Lease) -> Sighting:
        """What its provider says about it."""
        answer = await self._ask(lease, {"look": lease.lease_id})
        if answer.get("error"):
            raise LowtideError(str(answer["error"]), provider=lease.provider, sandbox_id=lease.sandbox_id)
        return Sighting(testimony=Testimony(answer["testimony"]), expires_at=answer["expires_at"])

    async def renew(self, lease: Lease, account: str | None = None) -> None:
        answer = await self._ask(lease, {"renew": lease.lease_id}, account)
        if answer.get("gone"):
            raise SandboxNotFoundError(
                str(answer["gone"]), provider=lease.provider, sandbox_id=lease.sandbox_id
            )
        if answer.get("error"):
            raise LowtideError(str(answer["error"]), provider=lease.provider, sandbox_id=lease.sandbox_id)

    async def aclose(self, accounts: Iterable[tuple[str, str]] = ()) -> None:
        """`accounts`: besides those that owners told of, all whose providers may have something to tidy up."""
        await asyncio.gather(*(worker.aclose() for worker in self._workers.values()))
        for key in (self._known.keys() | set(accounts)) - self._light.keys():
            # One that had nothing to end here: its owners may have left more than sandboxes (rooms of `local`),
            # which closing it tidies up.
            with contextlib.suppress(LowtideError):
                if registry.provider_class(key[0]).traits.light:
                    self._light[key] = connect(*key, self._environ(key))
        for provider in (*self._light.values(), *self._retired):
            await provider.aclose()

    def _environ(self, key: tuple[str, str]) -> dict[str, str]:
        """As its owner has it. The guardian's own is that of whoever started it: what the owner has not set goes."""
        told = self._known[key].environ if key in self._known else {}
        environ = {**os.environ, **told, "LOWTIDE_HOME": str(self._path)}
        return {name: value for name, value in environ.items() if value or name not in told}

    async def _ask(self, lease: Lease, job: dict[str, Any], account: str | None = None) -> dict[str, Any]:
        key = (lease.provider, account or lease.account)
        worker = self._workers.get(key)
        if worker is None or worker.ended:
            worker = self._workers[key] = _Worker(self._path, key, self._environ(key))
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await worker.ask(job)
        if answer.get("refused"):
            raise NoCredentials(str(answer["refused"]), provider=lease.provider, sandbox_id=lease.sandbox_id)
        return answer


def connect(name: str, account: str, environ: dict[str, str]) -> Provider:
    """The provider of exactly that account; another one must not be asked about its sandboxes."""
    try:
        provider = registry.provider_class(name).connect(environ)
    except (AuthenticationError, MissingDependencyError) as error:
        raise NoCredentials(str(error), provider=name) from error
    if provider.account != account:
        raise NoCredentials(
            f"the credentials at hand are for another {name} account than the lease's; set them and run: lowtide sweep",
            provider=name,
        )
    return provider


class _Worker:
    """One worker process and the jobs it has."""

    def __init__(self, path: Path, key: tuple[str, str], environ: dict[str, str]) -> None:
        self._arguments = (str(path), *key)
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._reading: asyncio.Task[None] | None = None
        self.ended = False

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = await self._start()
        if process.stdin is None:
            raise LowtideError("the worker has no input")
        self._count += 1
        number = self._count
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        if self.ended:
            raise LowtideError("the worker ended before it was asked", retryable=True)
        process.stdin.write(json.dumps({**job, "number": number}).encode() + b"\n")
        return await answer

    async def _start(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *isolated.command("lowtide.lifecycle.guardian_workers", *self._arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=self._environ,
                    limit=1 << 20,
                )
                self._reading = asyncio.ensure_future(self._read(self._process))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        try:
            while process.stdout is not None and (line := await process.stdout.readline()):
                answer = json.loads(line)
                waiting = self._waiting.pop(answer["number"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (
            ValueError,
            KeyError,
            TypeError,
        ) as error:  # no answer of ours: the next job gets another worker
            log.warning("a worker for %s said what is no answer: %s", self._arguments[1], error)
            process.kill()
        self.ended = True
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LowtideError("the worker ended before it answered", retryable=True))

    def retire(self) -> None:
        """It finishes what it has and ends."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def aclose(self) -> None:
        """It ends by itself, unless its SDK holds it: then it is killed, and its row says what is left to do."""
        self.retire()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), LEAVE_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()


def main(path: str, name: str, account: str) -> None:
    """The worker process. It ends with its input: a SIGTERM to the whole group is the guardian's to answer."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Answers go where nothing else does: an SDK that prints a word would be taken for one.
    with open(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        asyncio.run(_work(Path(path), name, account, answers))


async def _work(path: Path, name: str, account: str, answers: BinaryIO) -> None:
    ledger = SqliteLedger(path / "ledger.db")
    try:
        provider: Provider | None = connect(name, account, dict(os.environ))
        refusal = ""
    except LowtideError as error:
        provider, refusal = None, str(error)
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    room = asyncio.Semaphore(100)
    jobs: set[asyncio.Task[None]] = set()

    async def serve(job: dict[str, Any]) -> None:
        async with room:
            answer = await _do(ledger, provider, refusal, job)
        answers.write(json.dumps({**answer, "number": job["number"]}).encode() + b"\n")
        answers.flush()

    while True:
        try:
            line = await asyncio.wait_for(reader.readline(), IDLE_SECONDS)
        except TimeoutError:
            if jobs:
                continue
            break
        if not line:
            break
        task = asyncio.ensure_future(serve(json.loads(line)))
        jobs.add(task)
        task.add_done_callback(jobs.discard)
    if jobs:
        await asyncio.wait(jobs)
    if provider is not None:
        await provider.aclose()


async def _do(
    ledger: SqliteLedger, provider: Provider | None, refusal: str, job: dict[str, Any]
) -> dict[str, Any]:
    lease = await ledger.get(job.get("end") or job.get("look") or job["renew"])
    if lease is None:
        return {
            "outcome": Outcome.ALREADY_GONE,
            "why": "not in the ledger",
            "testimony": Testimony.NOTHING,
            "expires_at": None,
        }
    if provider is None:
        await ledger.note(lease.lease_id, f"cannot be ended from here: {refusal}")
        return {"refused": refusal}
    if "look" in job:
        try:
            sighting = await ask_provider.ask(provider, lease)
        except LowtideError as error:
            return {"error": str(error)}
        return {"testimony": sighting.testimony, "expires_at": sighting.expires_at}
    if "renew" in job:
        if lease.state is not LeaseState.LIVE:  # kept, released or ended while this worker was started
            return {}
        try:
            await renew_lease(ledger, provider, lease)
        except (SandboxNotFoundError, SandboxGone) as error:
            return {"gone": str(error)}
        except AuthenticationError as error:
            return {"refused": str(error)}
        except LowtideError as error:
            return {"error": str(error)}
        return {}
    report = await end_for_another(
        ledger,
        provider,
        lease,
        owner=lease.owner,
        decision=Decision(Fate(job["fate"]), job["why"]),
        deadline_seconds=120.0,
    )
    if isinstance(report.error, AuthenticationError):
        return {"refused": report.why}
    return {"outcome": report.outcome, "why": report.why}
