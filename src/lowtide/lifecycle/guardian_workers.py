"""Who talks to a provider for the guardian: light adapters in its own process, all others in a worker.

A worker is a process per account and network namespace. It is started like the account's owner, with the owner's
interpreter, packages and environment and, as the owner itself starts it, in the owner's network namespace: the
guardian's own installation may lack the SDK, and its network the way to the service. It is started when the account
is announced, comes to the guardian's socket, loads everything it needs and stays for as long as the account is in
use, so that the installation may be deleted meanwhile. The owner is warned if its worker does not work.
Where the owner is gone and its worker too, the guardian starts one as the owner announced it, else from its own
installation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lowtide import isolated, machine
from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    MissingDependencyError,
    SandboxGone,
    SandboxNotFoundError,
    without_secrets,
)
from lowtide.lifecycle import ask_provider
from lowtide.lifecycle.ask_provider import Sighting, Testimony
from lowtide.lifecycle.end import end_for_another
from lowtide.lifecycle.guardian_link import (
    MESSAGE_BYTES,
    PROTOCOL,
    WORKER,
    peer_pid,
    spawn,
    worker_environ,
)
from lowtide.lifecycle.guardian_link import connect as guardian_socket_of
from lowtide.lifecycle.keep import Decision, Fate
from lowtide.lifecycle.lease import Lease, LeaseState, Outcome, new_lease_id
from lowtide.lifecycle.provider_lifetime import renew_lease
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers import registry
from lowtide.providers.base import Provider

log = logging.getLogger("lowtide.guardian")

T = TypeVar("T")
_Key = tuple[str, str]
"""A provider and an account of it."""

ANSWER_SECONDS = 180.0
"""More than any job may take, unless the ledger is locked for long."""
PING_SECONDS = 10.0
"""For a worker that has not answered to show that it does not hang."""
LEAVE_SECONDS = 3.0
"""For the workers to end when the guardian leaves."""
UP_SECONDS = 20.0
"""For a worker to come to the socket, which it does before it loads anything."""
RETURN_SECONDS = 30.0
"""How long a worker whose guardian is gone waits for the next one."""
WARM_SECONDS = 10.0
"""For a worker's first request. It loads what an SDK imports late; what the answer is does not matter."""
AT_ONCE = 32
"""So many workers are started before they are needed. More accounts than that get theirs on demand."""


class NoCredentials(LowtideError):
    """There is nothing here to ask this account with. Another process may have it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to connect to one account. Only ever in memory."""

    name: str
    account: str
    environ: dict[str, str] = field(repr=False)


@dataclass(slots=True, eq=False)
class Start:
    """How one linked owner starts its processes, and the way to ask it to."""

    tell: Callable[[dict[str, Any]], None]
    """Sends the owner a message."""
    command: list[str] | None = None
    environ: dict[str, str] | None = field(default=None, repr=False)
    network: str = ""
    installation: str = ""
    closed: bool = False
    """Its link is: the owner is gone, or has another one."""
    started: set[tuple[str, str]] = field(default_factory=set)
    """The accounts that it has started a worker for."""

    @classmethod
    def of(cls, message: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> Start:
        return cls(
            tell,
            message.get("command"),
            message.get("environ"),
            str(message.get("network", "")),
            str(message.get("installation", "")),
        )

    @property
    def intact(self) -> bool:
        """Whether a guardian can be started from its installation."""
        return bool(
            self.command and os.access(self.command[0], os.X_OK) and os.path.exists(self.installation)
        )


class Workers:
    """The guardian's access to providers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[_Key, Credentials] = {}
        self._starts: dict[_Key, list[Start]] = {}
        """Who has announced the account; the newest is the last."""
        self._light: dict[_Key, Provider] = {}
        self._retired: list[Provider] = []
        self._workers: dict[_Key, list[Worker]] = {}
        self._expected: dict[tuple[_Key, str], tuple[float, Start]] = {}
        """Per account and network: until when a worker may still come, and which owner was asked for it."""
        self._obtaining: dict[_Key, asyncio.Lock] = {}
        self._arrival = asyncio.Event()
        self._launchers: set[int] = set()
        self.problems: dict[_Key, str] = {}
        """What is wrong with an account's worker, as its owners were told."""

    def learn(self, credentials: Credentials, start: Start | None = None) -> bool:
        """An owner told how it connects. True where that is new: then nobody works with the old ones any more."""
        key = (credentials.name, credentials.account)
        new = self._known.get(key) != credentials
        if new:
            self._known.pop(key, None)
            self._known[key] = credentials  # the newest are the last
            if key in self._light:
                self._retired.append(self._light.pop(key))
            for worker in self._workers.pop(key, []):
                worker.retire()
        if start is not None:
            starts = [one for one in self._starts.get(key, []) if one is not start]
            # Of owners that are gone one is enough to start a worker like it.
            gone = [one for one in starts if one.closed][-1:]
            self._starts[key] = [*gone, *(one for one in starts if not one.closed), start]
            self._prepare(key, start)
        return new

    def _prepare(self, key: _Key, start: Start) -> None:
        """Have what ends this account's sandboxes ready, while its owner can still be told that it is not."""
        try:
            if registry.provider_class(key[0]).traits.light:
                if key not in self._light:
                    self._light[key] = connect(*key, self._environ(key))
                return
        except MissingDependencyError:
            pass  # not in the guardian's installation: but in its owner's
        except Exception as error:
            self._problem(key, str(error) or type(error).__name__)
            return
        if self._serving(key, start.network) or sum(map(len, self._workers.values())) >= AT_ONCE:
            return
        self._request(key, start)

    def _request(self, key: _Key, start: Start) -> None:
        """Ask the owner for a worker, unless one is on its way."""
        loop = asyncio.get_running_loop()
        if self._is_coming(key, start.network):
            return
        self._expected[key, start.network] = loop.time() + UP_SECONDS, start
        start.started.discard(key)
        start.tell({"worker": {"name": key[0], "account": key[1]}})
        loop.call_later(UP_SECONDS, self._check_arrival, key, start)

    def _is_coming(self, key: _Key, network: str | None = None) -> bool:
        """Whether a worker is on its way. An owner that died before it has started one has started none."""
        now = asyncio.get_running_loop().time()
        return any(
            one == key
            and network in (None, where)
            and until > now
            and not (start.closed and key not in start.started)
            for (one, where), (until, start) in self._expected.items()
        )

    def _check_arrival(self, key: _Key, start: Start) -> None:
        self._expected.pop((key, start.network), None)
        if not start.closed and key in self._known and not self._workers.get(key):
            self._problem(key, f"the process that talks to it did not come up within {UP_SECONDS:g} s")

    def _problem(self, key: _Key, why: str) -> None:
        """Tell every owner of the account."""
        if self.problems.get(key) == why:
            return
        self.problems[key] = why
        log.warning("account %s of %s cannot be served: %s", key[1], key[0], why)
        text = (
            f"the guardian could not destroy the sandboxes of this process on {key[0]} if it crashed now: {why}. Until "
            "that is mended they are ended by the next lowtide process, by `lowtide sweep` or by their provider's lifetime"
        )
        for start in self._starts.get(key, []):
            if not start.closed:
                start.tell({"problem": text})

    def _serving(self, key: _Key, network: str | None = None) -> list[Worker]:
        """Those that can be asked, the newest last."""
        return [
            one
            for one in self._workers.get(key, [])
            if not one.ended and not one.refusal and network in (None, one.network)
        ]

    async def serve(
        self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A worker has come to the socket. Returns when it is gone."""
        key = (str(hello["name"]), str(hello["account"]))
        worker = Worker(hello, reader, writer, lambda: self._loaded(key, worker))
        for other in self._workers.get(key, []):  # also those that were refused: each attempt would leave one
            if other.network == worker.network:
                other.retire()
        self._workers.setdefault(key, []).append(worker)
        self._expected.pop((key, worker.network), None)
        self._reap()
        self._arrived()
        try:
            await worker.read()
        finally:
            with contextlib.suppress(KeyError, ValueError):
                self._workers[key].remove(worker)
            self._arrived()

    def _loaded(self, key: _Key, worker: Worker) -> None:
        if not worker.refusal:
            self.problems.pop(key, None)
        elif not self._serving(key):
            self._problem(key, worker.refusal)

    def _arrived(self) -> None:
        self._arrival.set()
        self._arrival = asyncio.Event()

    def only(self, accounts: Collection[_Key]) -> None:
        """Let the workers go that neither these accounts nor a linked owner needs."""
        names = {name for name, _ in accounts}  # a new key to an old account counts as another one
        for key, workers in list(self._workers.items()):
            if key[0] in names or any(not start.closed for start in self._starts.get(key, [])):
                continue
            for worker in workers:
                worker.retire()

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
        try:
            if not registry.provider_class(lease.provider).traits.light:
                return None
        except MissingDependencyError:  # not in this installation: perhaps in a worker's
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

    async def aclose(self, accounts: Iterable[tuple[str, str]] = (), *, leave: bool = True) -> None:
        """`accounts`: besides those that owners told of, all whose providers may have something to tidy up.

        `leave`: nothing is left for the workers either. Else they wait for the next guardian.
        """
        workers = [one for found in self._workers.values() for one in found]
        await asyncio.gather(*(one.aclose(leave=leave) for one in workers))
        for key in (self._known.keys() | set(accounts)) - self._light.keys():
            # One that had nothing to end here: its owners may have left more than sandboxes (rooms of `local`),
            # which closing it tidies up.
            with contextlib.suppress(Exception):
                if registry.provider_class(key[0]).traits.light:
                    self._light[key] = connect(*key, self._environ(key))
        for provider in (*self._light.values(), *self._retired):
            try:
                await provider.aclose()
            except Exception as error:  # the installation may have been deleted, so that imports fail
                log.warning("closing %s: %s", provider.name, error)
        self._reap()

    def _environ(self, key: _Key, start: Start | None = None) -> dict[str, str]:
        """As its owner has it. The guardian's own is that of whoever started it: what the owner has not set goes."""
        told = self._known[key].environ if key in self._known else {}
        environ = start.environ if start is not None and start.environ is not None else os.environ
        return worker_environ(environ, told, self._path)

    async def _ask(self, lease: Lease, job: dict[str, Any], account: str | None = None) -> dict[str, Any]:
        key = (lease.provider, account or lease.account)
        answer: dict[str, Any] = {}
        for worker in reversed(await self._obtain(key)):
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await worker.ask(job)
            except TimeoutError:
                why = "the worker did not answer"
                answer = {"outcome": Outcome.FAILED, "why": why, "error": why}
                if (
                    not await worker.answers()
                ):  # the next one is asked, else one is started with the next attempt
                    log.warning("a worker for %s hangs: it is killed", key[0])
                    worker.kill()
            # One in another network may get through.
            if (
                not answer.get("refused")
                and not answer.get("error")
                and answer.get("outcome") != Outcome.FAILED
            ):
                break
        if answer.get("refused"):
            raise NoCredentials(str(answer["refused"]), provider=lease.provider, sandbox_id=lease.sandbox_id)
        return answer

    async def _obtain(self, key: _Key) -> list[Worker]:
        """The workers of that account: those that are here or on their way, else one that is started now.

        Raises NoCredentials, with the last reason, where none can serve it.
        """
        async with self._obtaining.setdefault(key, asyncio.Lock()):
            if found := self._serving(key):
                return found
            for start in reversed([one for one in self._starts.get(key, []) if not one.closed]):
                self._request(key, start)
            while self._is_coming(key):
                await self._wait_for_arrival(0.1)
                if found := self._serving(key):
                    return found
            starts = [one for one in reversed(self._starts.get(key, [])) if one.command]
            for like in (*starts[:2], None):
                if await self._start(key, like) and (found := self._serving(key)):
                    return found
        refusals = [one.refusal for one in self._workers.get(key, []) if one.refusal]
        why = (
            refusals[-1] if refusals else self.problems.get(key, "no process can be started that talks to it")
        )
        raise NoCredentials(why, provider=key[0])

    async def _start(self, key: _Key, start: Start | None) -> bool:
        """Start a worker like that owner, or from here. False where there is nothing to start it with."""
        arguments = [str(self._path), *key]
        try:
            if start is not None and start.command is not None:
                command = [*start.command, *arguments]
            else:
                command = isolated.command(WORKER, *arguments, detached=True)
            launcher = spawn(command, self._environ(key, start), os.devnull)
        except (MissingDependencyError, OSError, ValueError) as error:
            log.warning(
                "no worker for %s can be started from %s: %s",
                key[0],
                "its owner's" if start else "here",
                error,
            )
            return False
        self._launchers.add(launcher)
        before = {id(one) for one in self._workers.get(key, [])}
        deadline = asyncio.get_running_loop().time() + UP_SECONDS
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            if any(id(one) not in before for one in self._workers.get(key, [])):
                return True
            if self._failed(launcher):
                return False
            await self._wait_for_arrival(min(left, 0.2))
        return False

    async def _wait_for_arrival(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrival.wait(), seconds)

    def _failed(self, launcher: int) -> bool:
        """Whether the interpreter could not even be started."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(launcher, os.WNOHANG)
            if pid:
                self._launchers.discard(launcher)
                return status != 0
        return False

    def _reap(self) -> None:
        for launcher in list(self._launchers):
            try:
                if os.waitpid(launcher, os.WNOHANG)[0]:
                    self._launchers.discard(launcher)
            except ChildProcessError:
                self._launchers.discard(launcher)


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


class Worker:
    """The guardian's end of the connection to a worker process, and the jobs that has."""

    def __init__(
        self,
        hello: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        loaded: Callable[[], None],
    ) -> None:
        self.network = str(hello.get("network", ""))
        self.refusal = ""
        """Why it cannot serve its account; empty where it can, or has not loaded everything yet."""
        self._loaded = loaded
        self.ended = False
        self._name = str(hello["name"])
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._gone = asyncio.Event()
        self._closing = False
        self._pidfd: int | None = None
        with contextlib.suppress(OSError):  # from another pid namespace it has no number here
            self._pidfd = os.pidfd_open(peer_pid(writer.get_extra_info("socket")))

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self.ended:
            raise LowtideError("the worker ended before it was asked", retryable=True)
        self._count += 1
        number = self._count
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._write({**job, "number": number})
        return await answer

    async def answers(self) -> bool:
        """Whether it does anything: it may wait for the ledger or its service, or it hangs for good."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self.ask({"ping": True})
        except (TimeoutError, LowtideError):
            return False
        return True

    def _write(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def read(self) -> None:
        """Until it is gone."""
        try:
            while line := await self._reader.readline():
                answer = json.loads(line)
                if "loaded" in answer:
                    self.refusal = str(answer["refused"])
                    self._loaded()
                    continue
                waiting = self._waiting.pop(answer["number"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a worker for %s sent what is no answer: %s", self._name, error)
            self.kill()
        finally:
            self.ended = True
            self._gone.set()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(LowtideError("the worker ended before it answered", retryable=True))
            if not self._closing:
                self._release()

    def retire(self) -> None:
        """It finishes what it has and ends."""
        self._write({"leave": True})

    async def aclose(self, *, leave: bool) -> None:
        """It ends by itself, unless its SDK holds it: then it is killed, and its row says what is left to do."""
        if not leave and not self._waiting:
            self._writer.close()
            return
        self._closing = True
        self.retire()
        try:
            await asyncio.wait_for(self._ended(), LEAVE_SECONDS)
        except TimeoutError:
            self.kill()
        self._writer.close()
        self._release()

    def _release(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    async def _ended(self) -> None:
        """Its process, not only its connection."""
        await self._gone.wait()
        if self._pidfd is not None:
            await _readable(self._pidfd)

    def kill(self) -> None:
        self.ended = True
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


async def _readable(fd: int) -> None:
    """Until it is; a pidfd is when its process has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


# The worker process.


def main(path: str, name: str, account: str) -> None:
    """The worker process. It ends when its guardian lets it go, or is gone and no other one comes."""
    asyncio.run(_Work(Path(path), name, account).run())


class _Work:
    def __init__(self, path: Path, name: str, account: str) -> None:
        self._path, self._name, self._account = path, name, account
        self._provider: Provider | None = None
        self._ledger: SqliteLedger | None = None
        self._refusal = ""
        self._told_to_end = False
        self._is_loaded = asyncio.Event()
        self._room = asyncio.Semaphore(100)
        self._jobs: set[asyncio.Task[None]] = set()
        self._reports: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        # A SIGTERM to the whole group is the guardian's to answer: it may have jobs for this process.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        loading = asyncio.ensure_future(self._load())
        while (link := await self._link()) is not None:
            if await self._serve(*link) or self._told_to_end:
                break
        loading.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
        if self._provider is not None:
            await self._provider.aclose()

    async def _load(self) -> None:
        await asyncio.sleep(0)  # first to the socket
        try:
            provider = connect(self._name, self._account, dict(os.environ))
            await self._warm(provider)
            self._provider = provider
        except Exception as error:
            self._refusal = without_secrets(str(error)) or type(error).__name__
        self._is_loaded.set()

    def _terminated(self) -> None:
        self._told_to_end = True

    async def _warm(self, provider: Provider) -> None:
        """One request, for what an SDK imports only then: its installation may be deleted by the time it is needed."""
        try:
            async with asyncio.timeout(WARM_SECONDS):
                await provider.get(new_lease_id())
        except (AuthenticationError, MissingDependencyError):
            raise
        except Exception as error:  # it does not exist; or the service does not answer now, but may then
            log.info("the first request to %s: %s", self._name, error)

    async def _link(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the guardian; None where there is none for long enough."""
        deadline = time.monotonic() + RETURN_SECONDS
        while not self._told_to_end and time.monotonic() < deadline:
            link = guardian_socket_of(self._path)
            if link is not None:
                return await asyncio.open_unix_connection(sock=link, limit=MESSAGE_BYTES)
            await asyncio.sleep(0.1)
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One guardian's jobs. True when that one has no more of them, False when it is gone."""
        hello = {
            "name": self._name,
            "account": self._account,
            "network": machine.network_namespace(),
        }
        writer.write(json.dumps({"protocol": PROTOCOL, "worker": hello}).encode() + b"\n")
        reporting = asyncio.ensure_future(self._report_loaded(writer))
        self._reports.add(reporting)
        reporting.add_done_callback(self._reports.discard)
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                job = json.loads(line)
                if job.get("leave") or job.get("refused"):
                    if self._jobs:
                        await asyncio.wait(self._jobs)
                    writer.close()
                    return True
                task = asyncio.ensure_future(self._answer(job, writer))
                self._jobs.add(task)
                task.add_done_callback(self._jobs.discard)
        writer.close()
        return False

    async def _report_loaded(self, writer: asyncio.StreamWriter) -> None:
        await self._is_loaded.wait()
        if not writer.is_closing():
            writer.write(json.dumps({"loaded": True, "refused": self._refusal}).encode() + b"\n")

    async def _answer(self, job: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "ping" in job:
            writer.write(json.dumps({"number": job["number"]}).encode() + b"\n")
            return
        async with self._room:
            await self._is_loaded.wait()
            try:
                if self._ledger is None:
                    self._ledger = SqliteLedger(self._path / "ledger.db")
                answer = await _do(self._ledger, self._provider, self._refusal, job)
            except Exception as error:
                why = without_secrets(str(error)) or type(error).__name__
                failed = {"outcome": Outcome.FAILED, "why": why}
                answer = failed if "end" in job else {"error": failed["why"]}
        if not writer.is_closing():
            writer.write(json.dumps({**answer, "number": job["number"]}).encode() + b"\n")


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
        except AuthenticationError as error:
            return {"refused": str(error)}
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
