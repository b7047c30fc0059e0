"""The engine's side of the spawner: starts it, sends it requests, reads its replies."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import json
import os
import resource
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide import engine, isolated, threads
from lowtide.errors import ResourceExhaustedError, SandboxFailedError, SandboxUnavailableError
from lowtide.providers.local.wait_readable import readable

_LONGEST = 60_000  # bytes that surely fit one packet
_SEND_SECONDS = 20.0
_MAY_PASS = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
Message = dict[str, Any]
_clients: weakref.WeakSet[SpawnerClient] = weakref.WeakSet()
_command_starters: weakref.WeakSet[CommandStarter] = weakref.WeakSet()


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
            data, ancillary, flags, _ = self.socket.recvmsg(65536, 256, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        fds: list[int] = []
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.extend(array.array("i", payload))
        if flags & socket.MSG_CTRUNC:  # the kernel drops the descriptors that this process may not have
            for fd in fds:
                os.close(fd)
            return {"errno": errno.EMFILE, "why": os.strerror(errno.EMFILE)}, []
        return (json.loads(data), fds) if data else None

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SpawnerClient:
    """One spawner, started on first use and again when it has died."""

    def __init__(self, configuration: Mapping[str, Any], started: Callable[[int], None]) -> None:
        """`started` is told its number before anything is asked of it, in a thread."""
        self._configuration, self._started = configuration, started
        self._control: socket.socket | None = None
        self._configured = False
        self._pid = 0
        self._lock: asyncio.Lock | None = None
        self._keys = itertools.count(1)
        self._spare: socket.socket | None = None  # to a process that waits to become a sandbox
        self._asked: Reply | None = None  # for the next one
        self._spare_command_starter: CommandStarter | None = None
        self.staged: dict[str, str] = {}
        self.idmapped = False
        self._own = (
            ""  # where each sandbox sees its layers with a range of ids of its own; "": they all share one
        )
        _clients.add(self)

    @property
    def running(self) -> bool:
        """Whether it has answered: before that nobody knows where it sees the layers."""
        return self._control is not None and self._configured

    async def start(self) -> None:
        if self.running:
            return
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if not self.running:
                await self._launch()

    async def _launch(self) -> None:
        ours, theirs = threads.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                ours.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
            ours.setblocking(False)
            self._pid = _run_spawner(theirs.fileno())
            theirs.close()
            joining = asyncio.get_running_loop().run_in_executor(None, self._started, self._pid)
            self._control = ours
            try:
                with await self._ask({"op": "configure", **self._configuration}, []) as reply:
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
            await joining
            self.staged, self.idmapped, self._own = message["staged"], message["idmapped"], message["own"]
            self._configured = True
        except BaseException:
            self.close()
            ours.close()
            theirs.close()
            raise

    @property
    def own_ranges(self) -> bool:
        """Whether every sandbox has a range of ids of its own."""
        return bool(self._own)

    def translate_layer(self, path: str) -> str:
        """The same place as the sandbox's range of ids sees it: for what is mounted in the sandbox."""
        home = self._configuration["home"]
        if self._own and path.startswith(f"{home}/"):
            return f"{self._own}/own{path.removeprefix(home)}"
        return self.translate(path)

    def translate_disk(self, path: str) -> str:
        """The same for the disk of a fixed size that is mounted at `path`."""
        return f"{self._own}/disk" if self._own else self.translate(path)

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
        await self.start()
        return await self._ask(message, fds)

    async def _ask(self, message: Message, fds: Sequence[int]) -> Reply:
        ours, theirs = threads.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            await self._send(message, [theirs.fileno(), *fds])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Reply(ours)

    async def create(self, message: Message, fds: Sequence[int]) -> None:
        """Hand the work to the process that waits for it, or have one made now. bwrap answers on its descriptors."""
        spare, self._spare = self._spare, None
        try:
            if spare is None or not _hand_over(spare, message, fds):
                (await self.request({"op": "create", **message}, fds)).close()
        finally:
            if spare is not None:
                spare.close()

    async def prepare(self) -> None:
        """Have a process made that waits to become the next sandbox, when there is none. Called in a quiet moment."""
        if self.running and self._asked is None and self._spare is None:
            self._asked = await self.request({"op": "spare"}, [])
            asyncio.get_running_loop().add_reader(self._asked.socket.fileno(), self._take_spare)
        if self.running and self._spare_command_starter is None and self._configuration["base"] is not None:
            self._spare_command_starter = CommandStarter(
                (await self.request({"op": "command_starter"}, [])).socket
            )

    def _take_spare(self) -> None:
        asked = self._asked
        if asked is None:
            return
        try:
            said = asked.take()
        except BlockingIOError:
            return
        self._stop_asking()
        if said is not None and said[1]:
            self._spare = threads.Socket(fileno=said[1][0])
            self._spare.setblocking(False)

    def _stop_asking(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # no loop runs here: it has ended, and its readers with it
                asyncio.get_running_loop().remove_reader(asked.socket.fileno())
            asked.close()

    async def tell(self, message: Message) -> None:
        """Send one request that has no answer."""
        await self._send(message, [])

    async def command_starter(self, message: Message, pidfd: int) -> CommandStarter:
        """A process at the door of one sandbox, which starts commands there faster than the spawner does."""
        command_starter, self._spare_command_starter = self._spare_command_starter, None
        if command_starter is not None:
            if command_starter.enter(message, pidfd):
                return command_starter
            command_starter.close()
        return CommandStarter((await self.request({"op": "command_starter", **message}, [pidfd])).socket)

    @property
    def command_starter_ready(self) -> bool:
        """Whether one waits for its sandbox."""
        return self._spare_command_starter is not None

    async def _send(self, message: Message, fds: Sequence[int]) -> None:
        control = self._control
        if control is None:
            raise SandboxUnavailableError("the local spawner has ended", provider="local")
        until = asyncio.get_running_loop().time() + _SEND_SECONDS
        with _packet(message, fds) as (data, ancillary):
            while True:
                try:
                    _sendmsg(control, data, ancillary)
                    return
                except BlockingIOError:
                    # Rare: a burst. Waiting by turns is simpler than several writers on one descriptor.
                    await asyncio.sleep(0.001)
                except OSError as error:
                    if error.errno not in _MAY_PASS:
                        self.close()
                        raise SandboxUnavailableError(
                            "the local spawner has ended", provider="local"
                        ) from error
                    if asyncio.get_running_loop().time() > until:
                        raise _too_many(error) from error
                    await asyncio.sleep(0.02)
                if self._control is not control:
                    raise SandboxUnavailableError("the local spawner has ended", provider="local")

    def close(self) -> None:
        """Let the spawner end. Its sandboxes go on; commands it started lose their reporter."""
        control, pid, self._control, self._pid = self._control, self._pid, None, 0
        self._configured = False
        self._lock = None
        self._stop_asking()
        spare, self._spare = self._spare, None
        command_starter, self._spare_command_starter = self._spare_command_starter, None
        for sock in (control, spare, command_starter):
            if sock is not None:
                sock.close()
        if pid:
            _reap(pid)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        held = (self._control, self._spare, self._asked, self._spare_command_starter)
        self._control, self._pid, self._lock, self._spare, self._asked = None, 0, None, None, None
        self._configured = False
        self._spare_command_starter = None
        for sock in held:
            if sock is not None:
                sock.close()


class CommandStarter:
    """The line to one. It leaves when this is closed and what it has started has ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.gone = False
        self.running = 0
        """How many of its commands are being waited for; only it can send them signals."""
        _command_starters.add(self)

    def enter(self, message: Message, pidfd: int) -> bool:
        """Tell one that was made beforehand which sandbox is its own."""
        return self._send(message, [pidfd])

    def request(self, message: Message, fds: Sequence[int]) -> Reply | None:
        """None: it is gone, or too busy to be asked."""
        ours, theirs = threads.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            if self._send(message, [theirs.fileno(), *fds]):
                return Reply(ours)
        ours.close()
        return None

    async def tell(self, message: Message) -> None:
        while not self._send(message, []) and not self.gone:  # noqa: ASYNC110 - rare: a burst
            await asyncio.sleep(0.001)

    def _send(self, message: Message, fds: Sequence[int]) -> bool:
        with _packet(message, fds) as (data, ancillary):
            try:
                _sendmsg(self._socket, data, ancillary)
                return True
            except OSError as error:
                self.gone = error.errno not in (*_MAY_PASS, errno.EAGAIN)
                return False

    def close(self) -> None:
        self._socket.close()


def _sendmsg(sock: socket.socket, data: bytes, ancillary: list[tuple[int, int, array.array[int]]]) -> None:
    """With as many descriptors under way as this process may have open, whoever sent them, the kernel takes no more.

    A sandbox of an ordinary user can have caused that, up to its own limit, which is below this process's hard one.
    """
    try:
        sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.ETOOMANYREFS or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _too_many(error: OSError) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"nothing can be asked of the local spawner now ({error.strerror}): too many descriptors of this user are "
        "on their way between processes. End the program or the sandbox that holds them, and try again",
        provider="local",
        retryable=True,
    )


@contextlib.contextmanager
def _packet(
    message: Message, fds: Sequence[int]
) -> Iterator[tuple[bytes, list[tuple[int, int, array.array[int]]]]]:
    """One message as it goes on a socket; what is too long for a packet goes in a memory file."""
    data = json.dumps(message).encode()
    memory = -1
    try:
        if len(data) > _LONGEST:
            memory = os.memfd_create("request", os.MFD_CLOEXEC)
            for at in range(0, len(data), 1 << 20):
                os.write(memory, data[at : at + (1 << 20)])
            data, fds = b"M", [*fds, memory]
        yield data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    finally:
        if memory >= 0:
            os.close(memory)


def _hand_over(spare: socket.socket, message: Message, fds: Sequence[int]) -> bool:
    with _packet(message, fds) as (data, ancillary):
        try:
            _sendmsg(spare, data, ancillary)
            return True
        except OSError:
            return False  # somebody has killed it


def _forget_all() -> None:
    for client in list(_clients):
        client.forget()
    for command_starter in list(_command_starters):
        command_starter.close()


engine.forget_in_child(_forget_all)


def _run_spawner(control: int) -> int:
    python = isolated.python()
    if (
        python == sys.executable
    ):  # the one under a virtual environment: starts faster, and needs nothing of it
        python = getattr(sys, "_base_executable", None) or python
    script = str(Path(__file__).with_name("spawner") / "__main__.py")
    null = os.open(os.devnull, os.O_RDWR)
    errors = 2 if os.environ.get("LOWTIDE_DEBUG") else null
    try:
        return threads.posix_spawn(
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

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: then init reaps it
        threads.start(wait)
