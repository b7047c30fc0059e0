"""The engine's side of the spawner: starts it, sends it requests, reads its replies."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide import engine
from lowtide.errors import SandboxFailedError, SandboxUnavailableError

_LONGEST = 60_000  # bytes that surely fit one packet
Message = dict[str, Any]
_clients: weakref.WeakSet[SpawnerClient] = weakref.WeakSet()


class Reply:
    """The socket on which one request is answered."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    async def next(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors; None when the spawner has let go."""
        while True:
            try:
                return self.take()
            except BlockingIOError:
                await readable(self.socket.fileno())

    def take(self) -> tuple[Message, list[int]] | None:
        """The same without waiting: BlockingIOError when there is none yet."""
        try:
            data, ancillary, _, _ = self.socket.recvmsg(65536, 256, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        fds: list[int] = []
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.extend(array.array("i", payload))
        return (json.loads(data), fds) if data else None

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SpawnerClient:
    """One spawner, started on first use and again when it has died."""

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self._configuration = configuration
        self._control: socket.socket | None = None
        self._pid = 0
        self._lock: asyncio.Lock | None = None
        self._keys = itertools.count(1)
        self.staged: dict[str, str] = {}
        self.idmapped = False
        _clients.add(self)

    @property
    def running(self) -> bool:
        return self._control is not None

    async def start(self) -> None:
        if self._control is not None:
            return
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._control is None:
                await self._launch()

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                ours.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
            ours.setblocking(False)
            self._pid = _run_spawner(theirs.fileno())
            theirs.close()
            self._control = ours
            try:
                with await self.request({"op": "configure", **self._configuration}, []) as reply:
                    answer = await reply.next()
            except OSError:
                answer = None
            if answer is None:
                raise SandboxUnavailableError("the local spawner ended while it started", provider="local")
            message = answer[0]
            if "why" in message:
                raise SandboxFailedError(
                    f"this machine does not let lowtide prepare sandboxes: {message['why']} (see `lowtide doctor`)",
                    provider="local",
                    reason="setup",
                )
            self.staged, self.idmapped = message["staged"], message["idmapped"]
        except BaseException:
            self.close()
            ours.close()
            theirs.close()
            raise

    def translate(self, path: str) -> str:
        """The same place as the spawner's children see it."""
        best = max(
            (s for s in self.staged if path == s or path.startswith(s.rstrip("/") + "/")),
            key=len,
            default=None,
        )
        return path if best is None else self.staged[best] + path[len(best.rstrip("/")) :]

    def new_key(self) -> int:
        return next(self._keys)

    async def request(self, message: Message, fds: Sequence[int]) -> Reply:
        """Send one request. The answer comes on what this returns."""
        await self.start() if self._control is None else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            await self._send(message, [theirs.fileno(), *fds])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Reply(ours)

    async def tell(self, message: Message) -> None:
        """Send one request that has no answer."""
        await self._send(message, [])

    async def _send(self, message: Message, fds: Sequence[int]) -> None:
        control = self._control
        if control is None:
            raise SandboxUnavailableError("the local spawner has ended", provider="local")
        data = json.dumps(message).encode()
        spare = -1
        if len(data) > _LONGEST:
            spare = os.memfd_create("request", os.MFD_CLOEXEC)
            for at in range(0, len(data), 1 << 20):
                os.write(spare, data[at : at + (1 << 20)])
            data, fds = b"M", [*fds, spare]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            while True:
                try:
                    control.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    # Rare: a burst. Waiting by turns is simpler than several writers on one descriptor.
                    await asyncio.sleep(0.001)
                except OSError as error:
                    self.close()
                    raise SandboxUnavailableError("the local spawner has ended", provider="local") from error
        finally:
            if spare >= 0:
                os.close(spare)

    def close(self) -> None:
        """Let the spawner end. Its sandboxes go on; commands it started lose their reporter."""
        control, pid, self._control, self._pid = self._control, self._pid, None, 0
        self._lock = None
        if control is not None:
            control.close()
        if pid:
            _reap(pid)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        control, self._control, self._pid, self._lock = self._control, None, 0, None
        if control is not None:
            control.close()


def _forget_all() -> None:
    for client in list(_clients):
        client.forget()


engine.forget_in_child(_forget_all)


def _run_spawner(control: int) -> int:
    python = getattr(sys, "_base_executable", None) or sys.executable
    script = str(Path(__file__).with_name("spawner") / "__main__.py")
    null = os.open(os.devnull, os.O_RDWR)
    errors = 2 if os.environ.get("LOWTIDE_DEBUG") else null
    try:
        return os.posix_spawn(
            python,
            [python, "-I", "-S", script, "3"],
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, errors, 2),
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, control, 3),
            ],
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM),
        )
    finally:
        os.close(null)


def _reap(pid: int) -> None:
    """It ends within a moment of its control socket; nobody waits for it longer than that."""
    import threading

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    threading.Thread(target=wait, name="lowtide-reap", daemon=True).start()


async def readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not waiter.done():
            waiter.set_result(None)

    loop.add_reader(fd, ready)
    try:
        await waiter
    finally:
        loop.remove_reader(fd)
