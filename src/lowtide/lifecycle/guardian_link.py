"""The owner's link to its guardian: start it when needed, tell it who we are, notice when it dies.

Nothing here is waited for: the row in the ledger is what makes a sandbox safe, and a guardian that
comes up later reads it. Credentials go over the private socket and stay in the guardian's memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.lifecycle.owner import Owner
from lowtide.providers.base import Provider

log = logging.getLogger("lowtide.guardian")

SOCKET = "guardian.sock"


@dataclass(slots=True)
class GuardianLink:
    """One per process and state directory. Lives on the engine's loop."""

    path: Path
    _providers: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    _socket: socket.socket | None = None
    _linking: asyncio.Task[None] | None = None
    _launched: int | None = None

    def wanted(self, provider: Provider) -> None:
        """Before each create: have a guardian that can end what this provider makes. Does not wait.

        The guardian is launched before the intent is written, so there is no instant with a row
        and nobody who will look at it.
        """
        key = (provider.name, provider.account)
        known = key in self._providers
        if not known:
            self._providers[key] = provider.credentials()
        if self._socket is not None:
            if not known:
                self._send()
            return
        if not self._try_to_connect() and self._linking is None:
            self._launch()
            self._linking = asyncio.ensure_future(self._link())

    def forget(self) -> None:
        """In a forked child: let go of the parent's link without ending it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._linking = None

    async def _link(self) -> None:
        """Until connected: launch and try. A launched guardian is up within a fraction of a second."""
        loop = asyncio.get_running_loop()
        patience = 0.7
        again_at = loop.time() + patience
        try:
            while patience < 60:
                await asyncio.sleep(min(patience / 20, 0.5))
                self._reap()
                if self._try_to_connect():
                    return
                if loop.time() > again_at:  # it died on its way up, or the one before is only leaving
                    self._launch()
                    patience *= 1.6
                    again_at = loop.time() + patience
            log.error(
                "no guardian could be started; after a crash, sandboxes are ended by the next lowtide process"
            )
        finally:
            self._linking = None

    def _try_to_connect(self) -> bool:
        link = connect(self.path)
        if link is None:
            return False
        self._socket = link
        asyncio.get_running_loop().add_reader(link.fileno(), self._on_readable)
        self._send()
        return self._socket is not None  # else it died in this moment

    def _send(self) -> None:
        owner = Owner.current()
        message: dict[str, Any] = {
            "owner": owner.as_dict(),
            "providers": [
                {"name": name, "account": account, "environ": environ}
                for (name, account), environ in self._providers.items()
            ],
        }
        try:
            if self._socket is not None:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._lost()

    def _on_readable(self) -> None:
        try:
            if self._socket is not None and self._socket.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._lost()

    def _lost(self) -> None:
        """The guardian died or left. Start it again: we may hold leases."""
        loop = asyncio.get_running_loop()
        if self._socket is not None:
            loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._linking is None:
            self._launch()
            self._linking = asyncio.ensure_future(self._link())

    def _launch(self) -> None:
        self._reap()
        if self._launched is None:
            self._launched = launch(self.path)

    def _reap(self) -> None:
        """The launcher process exits as soon as the guardian has detached from it."""
        if self._launched is None:
            return
        try:
            if os.waitpid(self._launched, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:  # the program waits for all its children
            pass
        self._launched = None


def connect(path: Path) -> socket.socket | None:
    """A connection to the guardian of that state directory, or None when there is none."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with DirectoryAddress(path) as address:
            link.connect(address)
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return link
    except OSError:
        link.close()
        return None


class DirectoryAddress:
    """The socket's address through an open directory: a path of any length fits the 108 bytes there are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        self._fd = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{SOCKET}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def launch(path: Path) -> int | None:
    """Start a guardian, detached. Returns the launcher's pid, or None where none can be started."""
    package = str(Path(__file__).resolve().parents[2])
    program = (
        "import os, sys\n"
        "if os.fork(): os._exit(0)\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from lowtide.lifecycle.guardian import main\n"
        "main(sys.argv[2])\n"
    )
    environ = dict(os.environ)
    environ.pop("LOWTIDE_CRASH_AT", None)
    if "LOWTIDE_GUARDIAN_CRASH_AT" in environ:
        environ["LOWTIDE_CRASH_AT"] = environ["LOWTIDE_GUARDIAN_CRASH_AT"]
    try:
        null = os.open(os.devnull, os.O_RDWR)
        try:
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", program, package, str(path)],
                environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)],
                setsid=True,
                setsigmask=(),
                setsigdef=_catchable(),
            )
        finally:
            os.close(null)
    except (OSError, NotImplementedError, ValueError) as error:
        log.error("cannot start the guardian: %s", error)
        return None


def _catchable() -> list[int]:
    import signal

    return [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
