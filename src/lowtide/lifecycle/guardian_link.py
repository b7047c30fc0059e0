"""The owner's link to its guardian: start it when needed, tell it who we are, notice when it dies.

Nothing here is waited for: the row in the ledger is what makes a sandbox safe, and a guardian that
comes up later reads it. Credentials go over the private socket, only to a process of the same user,
and stay in the guardian's memory.

The guardian may come from another installation, environment or network than this process: the first
owner has started it. So each owner announces its own with its credentials, and the process that talks to
a provider for the guardian (the worker of an account) is started by the owner, when the guardian asks
for one: with the owner's interpreter, packages, environment and network namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide import isolated, logger, machine, orphans, threads
from lowtide.errors import MissingDependencyError
from lowtide.lifecycle.owner import Owner
from lowtide.providers.base import Provider

log = logger.get("lowtide.guardian")

PROTOCOL = 2
"""Of the messages on the socket. Part of the socket's and the lock's name, so that owners and guardians of different
protocols, from installations of different versions, never meet: each has its own guardian."""
MESSAGE_BYTES = 1 << 20
"""The longest message either end takes: one account with its environment."""
WORKER = "lowtide.lifecycle.guardian_workers"
LOG = "guardian.log"
PATIENCE_SECONDS = 0.7
"""How long the first guardian launched may take before another is; each next one gets 1.6 times as long."""
UP_SECONDS = 5.0
"""A guardian is up within a fraction of a second. After this the user is warned; it is tried on meanwhile."""
REAP_SECONDS = (0.3, 2.0)
"""When to look whether a worker could be started; then with every look at the leases."""
LAUNCHES = 6
"""After so many that did not come up (about 18 s) it is left alone for a while."""
AGAIN_SECONDS = 300.0
_MOST_SAID = 20
"""Different problems that a process is warned of."""


@dataclass(slots=True)
class GuardianLink:
    """One per process and state directory. Lives on the engine's loop."""

    path: Path
    ledger_replaced: Callable[[], None] = lambda: None
    """Called when the guardian has found another ledger file in place of ours."""
    _providers: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    _socket: socket.socket | None = None
    _linking: asyncio.Task[None] | None = None
    _launched: int | None = None
    _workers: dict[int, str] = field(default_factory=dict)
    """Launchers of workers, until they are reaped, and their providers."""
    _unsent: bytearray = field(default_factory=bytearray)
    _unread: bytearray = field(default_factory=bytearray)
    _again_at: float = 0.0
    _said: set[str] = field(default_factory=set)

    def wanted(self, provider: Provider) -> None:
        """Before each create: have a guardian that can end what this provider makes. Does not wait.

        The guardian is launched before the intent is written, so there is no instant with a row
        and nobody who will look at it.
        """
        machine.hold_boot(self.path)
        key, environ = (provider.name, provider.account), provider.credentials()
        known = self._providers.get(key) == environ
        self._providers[key] = environ
        if self._socket is not None:
            if not known:
                self._tell([key])
            return
        if self._linking is not None:
            # It may have come up since the last look: what it is not told now it could not end after a kill.
            if self._try_to_connect():
                self._linking.cancel()
        else:
            self.look_again()

    def look_again(self) -> None:
        """While leases are held: what could not be started for want of a process may be possible by now."""
        if os.path.isdir(self.path):
            machine.hold_boot(self.path)
        self._reap_workers()
        unlinked = self._providers and self._socket is None and self._linking is None
        if unlinked and asyncio.get_running_loop().time() >= self._again_at:
            self._come_up()

    def forget(self) -> None:
        """In a forked child: let go of the parent's link without ending it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._linking = None
        self._unsent.clear()

    def _come_up(self) -> None:
        if not self._try_to_connect() and self._linking is None and self._launch():
            self._linking = asyncio.ensure_future(self._link())

    async def _link(self) -> None:
        """Until connected: launch and try. A launched guardian is up within a fraction of a second."""
        loop = asyncio.get_running_loop()
        patience = PATIENCE_SECONDS
        again_at, late_at = loop.time() + patience, loop.time() + UP_SECONDS
        try:
            for _ in range(LAUNCHES):
                while loop.time() < again_at:
                    await asyncio.sleep(min(patience / 20, 0.5))
                    self._reap()
                    if self._try_to_connect():
                        return
                    if loop.time() > late_at:
                        self._say_not_up()
                # It died on its way up, or the one before is only leaving.
                self._launch()
                patience *= 1.6
                again_at = loop.time() + patience
            self._again_at = loop.time() + AGAIN_SECONDS
            self._say_not_up()
        finally:
            self._linking = None

    def _say_not_up(self) -> None:
        if _is_removed(self.path):  # a temporary home that its program has deleted
            return
        self._say_once(
            f"the guardian did not come up within {UP_SECONDS:g} s (the reason may be in {self.path / LOG}). Until it "
            "does, what a crash of this process leaves is destroyed by the next lowtide process, by `lowtide sweep` or "
            "by its provider's lifetime"
        )

    def _try_to_connect(self) -> bool:
        link = connect(self.path)
        if link is None:
            return False
        stranger = peer_uid(link)
        if stranger != os.geteuid():  # no credential goes there
            link.close()
            self._say_once(f"user {stranger} listens at {self.path / socket_name()}: it is told nothing")
            return False
        self._socket = link
        self._unsent.clear()
        self._unread.clear()
        asyncio.get_running_loop().add_reader(link.fileno(), self._on_readable)
        self._introduce()
        self._tell(list(self._providers))
        return self._socket is not None  # else it died in this moment

    # Messages: how to start a process like this one, then one message per account. None is sent twice on one link.

    def _introduce(self) -> None:
        owner = Owner.current().as_dict()
        start: dict[str, Any] = {
            "network": machine.network_namespace(),
            "installation": isolated.installation(),
            "command": None,
        }
        with contextlib.suppress(MissingDependencyError):
            start["command"] = isolated.command(WORKER, detached=True)
        start["environ"] = dict(os.environ)
        line = _line({"protocol": PROTOCOL, "owner": owner, "providers": [], "start": start})
        if (
            len(line) > MESSAGE_BYTES
        ):  # then the guardian starts a worker with its own, if this process is gone
            line = _line(
                {"protocol": PROTOCOL, "owner": owner, "providers": [], "start": {**start, "environ": None}}
            )
        self._unsent += line

    def _tell(self, keys: list[tuple[str, str]]) -> None:
        owner = Owner.current().as_dict()
        for name, account in keys:
            provider = {"name": name, "account": account, "environ": self._providers[name, account]}
            line = _line({"protocol": PROTOCOL, "owner": owner, "providers": [provider]})
            if len(line) > MESSAGE_BYTES:
                self._say_once(
                    f"the settings of {name} account {account} are longer than {MESSAGE_BYTES} bytes: the guardian "
                    "cannot be told them, and can end its sandboxes only with what is in its own environment"
                )
                line = _line({"protocol": PROTOCOL, "owner": owner, "providers": []})
            self._unsent += line
        self._send()

    def _send(self) -> None:
        """As much as it takes now; the rest when it takes more. A guardian that stands still holds up nobody."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
            loop.remove_writer(self._socket.fileno())
        except BlockingIOError:
            loop.add_writer(self._socket.fileno(), self._send)
        except OSError:
            self._lost()

    def _on_readable(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._unread += data
        while b"\n" in self._unread:
            line, _, rest = self._unread.partition(b"\n")
            self._unread = bytearray(rest)
            self._hear(json.loads(line))
        if not data:
            self._lost()

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("ledger") == "replaced":
            self.ledger_replaced()
        if "worker" in message:
            self._start_worker(str(message["worker"]["name"]), str(message["worker"]["account"]))
        if "problem" in message and len(self._said) < _MOST_SAID:
            self._say_once(str(message["problem"]))
        if "refused" in message:
            self._say_once(f"the guardian refused this process: {message['refused']}")
            self._let_go()
            self._again_at = asyncio.get_running_loop().time() + AGAIN_SECONDS
        if message.get("full"):
            # It watches us by looking, and has no descriptor left for a link: no reason to start another.
            self._let_go()
            loop = asyncio.get_running_loop()
            self._again_at = loop.time() + AGAIN_SECONDS

    def _start_worker(self, name: str, account: str) -> None:
        """The process that talks to that account for the guardian: like this one, and no child of it."""
        self._reap_workers()
        told = self._providers.get((name, account))
        if told is None:
            return
        try:
            command = isolated.command(WORKER, str(self.path), name, account, detached=True)
            launcher = spawn(command, worker_environ(os.environ, told, self.path), os.devnull)
            self._workers[launcher] = name
            for seconds in REAP_SECONDS:
                asyncio.get_running_loop().call_later(seconds, self._reap_workers)
            started = {"name": name, "account": account}
            owner = Owner.current().as_dict()
            self._unsent += _line({"protocol": PROTOCOL, "owner": owner, "providers": [], "started": started})
            self._send()
        except (MissingDependencyError, OSError, ValueError) as error:
            self._say_once(
                f"no process can be started that destroys the sandboxes of {name} if this one crashes: {error}. Then the "
                "guardian tries from its own installation; else the provider's lifetime ends them"
            )

    def _reap_workers(self) -> None:
        """A launcher exits as soon as its worker has detached from it."""
        for pid, name in list(self._workers.items()):
            with contextlib.suppress(ChildProcessError):  # the program waits for all its children
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended == 0:
                    continue
                if status:
                    self._say_once(
                        f"the process that destroys the sandboxes of {name} if this one crashes could not be started "
                        f"(exit status {os.waitstatus_to_exitcode(status)}); is LOWTIDE_PYTHON, or the Python that "
                        "runs here, complete?"
                    )
            del self._workers[pid]

    def _lost(self) -> None:
        """The guardian died or left. Start it again: we may hold leases."""
        if self._let_go() and self._linking is None and self._launch():
            self._linking = asyncio.ensure_future(self._link())

    def _let_go(self) -> bool:
        if self._socket is None:
            return False
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None
        return True

    def _launch(self) -> bool:
        """Start one, unless the last is still on its way. False where none can be started at all."""
        self._reap()
        if self._launched is None:
            try:
                self._launched = launch(self.path)
            except (MissingDependencyError, OSError, NotImplementedError, ValueError) as error:
                self._again_at = asyncio.get_running_loop().time() + AGAIN_SECONDS
                if _is_removed(self.path):  # as above: no reason to warn
                    return False
                self._say_once(
                    f"no guardian can be started: {error}. What a crash of this process leaves is ended by the next "
                    "lowtide process that can start one, by `lowtide sweep`, or by its provider's lifetime"
                )
                return False
        return True

    def _reap(self) -> None:
        """The launcher process exits as soon as the guardian has detached from it."""
        if self._launched is None:
            return
        try:
            pid, status = os.waitpid(self._launched, os.WNOHANG)
            if pid == 0:
                return
            if status:
                self._say_once(
                    f"the guardian could not be started (exit status {os.waitstatus_to_exitcode(status)}; the reason "
                    f"may be in {self.path / LOG}); is LOWTIDE_PYTHON, or the Python that runs here, complete?"
                )
        except ChildProcessError:  # the program waits for all its children
            pass
        self._launched = None

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)


def _is_removed(path: Path) -> bool:
    """Whether the directory is gone, and not only out of reach: that is worth a warning."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def connect(path: Path) -> socket.socket | None:
    """A connection to the guardian of that state directory, or None when there is none. Never waits."""
    link = threads.Socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # One that is stopped and has its hands full would let a connect wait for as long as it stands still.
        link.setblocking(False)
        with DirectoryAddress(path) as address:
            link.connect(address)
        return link
    except OSError:
        link.close()
        return None


def peer_uid(link: socket.socket) -> int:
    """The user on the other end."""
    return int(struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def peer_pid(link: socket.socket) -> int:
    """The process on the other end; 0 where it has no number in this pid namespace."""
    return int(struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def socket_name() -> str:
    return f"guardian-{_view()}.sock"


def lock_name() -> str:
    return f"guardian-{_view()}.lock"


def _view() -> str:
    """Of this machine, boot and pid namespace: a guardian protects those whose death it can see, and only those.

    And of what it sees and may do, see `machine.reach`: one with less could not end their local sandboxes. And of the
    protocol, see `PROTOCOL`.
    """
    seen = f"{PROTOCOL} {machine.machine_id()} {machine.boot_id()} {machine.namespace()} {machine.reach()}"
    return hashlib.sha256(seen.encode()).hexdigest()[:8]


class DirectoryAddress:
    """The socket's address through an open directory: a path of any length fits the 108 bytes there are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        self._fd = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{socket_name()}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def launch(path: Path) -> int:
    """Start a guardian, detached. Returns the launcher's pid. What stops it on its way up is in its log."""
    command = isolated.command("lowtide.lifecycle.guardian_process", str(path), detached=True)
    return spawn(command, os.environ, path / LOG)


def worker_environ(environ: Mapping[str, str], told: Mapping[str, str], path: Path) -> dict[str, str]:
    """The environment of a worker: its owner's, with how that connects. What the owner has told as unset is unset."""
    full = {**environ, **told, "LOWTIDE_HOME": str(path)}
    return {name: value for name, value in full.items() if value or name not in told}


def spawn(command: list[str], environ: Mapping[str, str], errors: str | Path) -> int:
    """Start a detached process of lowtide's in a session of its own. Returns its launcher's pid."""
    environ = dict(environ)
    environ.pop("LOWTIDE_CRASH_AT", None)
    if "LOWTIDE_GUARDIAN_CRASH_AT" in environ:
        environ["LOWTIDE_CRASH_AT"] = environ["LOWTIDE_GUARDIAN_CRASH_AT"]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    log_file = os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        launcher = threads.posix_spawn(
            command[0],
            command,
            environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, log_file, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=[n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)],
        )
        orphans.expect_from(launcher)
        return launcher
    finally:
        os.close(log_file)
        os.close(null)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
