"""One command in a sandbox, as the engine sees it: pipes, exit, signals, ending its whole tree."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
import termios
import time
from collections.abc import AsyncIterator, Iterator

from lowtide.errors import (
    ResourceExhaustedError,
    SandboxFailedError,
    SandboxGone,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.base import STDERR, STDOUT, TerminalSize
from lowtide.providers.local.pause import paused
from lowtide.providers.local.sandbox_directory import ProcessMark
from lowtide.providers.local.spawner.end_tree import end_tree, open_processes
from lowtide.providers.local.spawner_client import CommandStarter, Message, Reply, SpawnerClient

_CHUNK = 1 << 16
_SPAWNER_SECONDS = 3.0
"""How long the spawner may take to say that a command has ended, after the grace; then it is done without it."""


class LocalProcess:
    """The `ProcessHandle` of the local provider."""

    def __init__(
        self,
        *,
        client: SpawnerClient,
        starter: SpawnerClient | CommandStarter,
        reply: Reply,
        key: int,
        mark: str,
        inner: ProcessMark,
        sandbox_id: str,
        streams: dict[int, int],
        stdin: int | None,
        drain_seconds: float,
    ) -> None:
        self._client, self._reply, self._key, self._mark = client, reply, key, mark
        self._starter = starter  # whose child it is
        self._inner, self._sandbox_id = inner, sandbox_id
        self._streams = streams  # descriptor -> STDOUT or STDERR
        self._stdin = stdin
        self._tty = False
        self._hung = False
        self._open_line = False  # what was typed last was no line's end
        self._drain_seconds = drain_seconds
        self.streams_open = False
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._exit.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody has to ask
        self._wake: asyncio.Event = asyncio.Event()
        self._loop.add_reader(reply.socket.fileno(), self._on_reply)

    def count_in(self, command_starter: CommandStarter) -> None:
        """It must stay while this one runs."""
        command_starter.running += 1

        def ended(_: object) -> None:
            command_starter.running -= 1

        self._exit.add_done_callback(ended)

    def take_terminal(self, master: int) -> None:
        os.set_blocking(master, False)
        self._tty = True
        self._streams = {master: STDOUT}
        self._stdin = master

    def _on_reply(self) -> None:
        try:
            while not self._exit.done():
                self._handle(self._reply.take())
        except BlockingIOError:
            return
        self._loop.remove_reader(self._reply.socket.fileno())
        self._reply.close()
        self._wake.set()

    def _handle(self, said: tuple[Message, list[int]] | None) -> None:
        if said is None and not self._inner.alive():
            self._exit.set_exception(gone(self._sandbox_id))
            return
        if said is None:
            self._exit.set_exception(
                SandboxUnavailableError(
                    "the spawner that ran this command has ended",
                    provider="local",
                    sandbox_id=self._sandbox_id,
                )
            )
            return
        message, fds = said
        if "tty" in message:
            self.take_terminal(fds[0])
            self._wake.set()
        elif "no_user" in message:
            self._exit.set_exception(
                ValidationError(
                    f"the sandbox knows no user {message['no_user']}",
                    argument="user",
                    provider="local",
                    sandbox_id=self._sandbox_id,
                )
            )
        elif "paused" in message:
            self._exit.set_exception(paused(self._sandbox_id))
        elif "errno" in message:
            self._exit.set_exception(entry_error(message, self._inner, self._sandbox_id))
        elif "exit" in message:
            if message["exit"] == 137 and not self._inner.alive():
                self._exit.set_exception(gone(self._sandbox_id, "the sandbox ended while the command ran"))
            else:
                self._exit.set_result(message["exit"])

    @property
    def exited(self) -> bool:
        return self._exit.done()

    async def terminal_ready(self) -> None:
        while not self._tty and not self._exit.done():
            await self._wake.wait()
            self._wake.clear()

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        until: float | None = None  # how long others that hold the streams are listened to
        try:
            while self._streams:
                if until is None and self._exit.done():
                    until = self._loop.time() + self._drain_seconds
                if until is not None and self._loop.time() >= until:
                    for stream, data in self._rest():
                        yield stream, data
                    break
                quiet = True
                for fd, stream in list(self._streams.items()):
                    chunk = self._read(fd, _CHUNK)
                    if chunk:
                        quiet = False
                        yield stream, chunk
                if quiet and self._streams:
                    await self._more(until)
            # The descriptors may be closed long before the end: `sh -c 'exec >&-; sleep 9'`.
            await asyncio.wait([self._exit])
        finally:
            for fd in list(self._streams):
                if fd != self._stdin:
                    self._drop(fd)

    def _read(self, fd: int, size: int) -> bytes | None:
        """What is there. None: nothing yet; and b"" after the end."""
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            if not self._exit.done():  # nobody has the terminal open now: closed, it would kill the command
                self._hung = True
                return None
            data = b""
        if not data:
            self._drop(fd)
        return data

    def _rest(self) -> Iterator[tuple[int, bytes]]:
        """What others have written by now and no more: they may write without an end."""
        for fd, stream in list(self._streams.items()):
            left = _CHUNK if self._tty else struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
            while left > 0 and (data := self._read(fd, min(left, _CHUNK))):
                left -= len(data)
                yield stream, data
        self.streams_open = bool(self._streams)

    async def _more(self, until: float | None) -> None:
        if until is None and self._exit.done():
            return
        self._wake.clear()
        fds = list(self._streams) if not self._hung or until is not None else []
        for fd in fds:
            self._loop.add_reader(fd, self._wake.set)
        timer = self._loop.call_at(until, self._wake.set) if until is not None else None
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()
            for fd in fds:
                self._loop.remove_reader(fd)

    def _drop(self, fd: int) -> None:
        if self._streams.pop(fd, None) is not None:
            if fd == self._stdin:
                self._stdin = None
            os.close(fd)

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    async def write_stdin(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            fd = self._stdin
            if fd is None or self._exit.done():
                raise BrokenPipeError(errno.EPIPE, "the command's standard input is closed")
            try:
                written = os.write(fd, view[:_CHUNK])
                self._open_line = view[written - 1] != 0x0A
                view = view[written:]
            except BlockingIOError:
                await self._writable(fd)
            except OSError as error:
                if not self._tty:
                    await self.close_stdin()
                raise BrokenPipeError(errno.EPIPE, "the command's standard input is closed") from error

    async def _writable(self, fd: int) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()

        def ready(*_: object) -> None:
            if not waiter.done():
                waiter.set_result(None)

        self._loop.add_writer(fd, ready)
        self._exit.add_done_callback(ready)
        try:
            await waiter
        finally:
            self._loop.remove_writer(fd)
            self._exit.remove_done_callback(ready)

    async def close_stdin(self) -> None:
        fd = self._stdin
        if fd is None:
            return
        if self._tty:
            with contextlib.suppress(BrokenPipeError):
                # End of file, as a person types it: once more after an open line, which the first hands over.
                # It waits as all input does: a terminal that is full takes not even this.
                await self.write_stdin(b"\x04\x04" if self._open_line else b"\x04")
            return
        self._stdin = None
        os.close(fd)

    async def resize(self, size: TerminalSize) -> None:
        if self._tty and self._stdin is not None and not self._exit.done():
            with contextlib.suppress(OSError):
                fcntl.ioctl(
                    self._stdin, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0)
                )

    async def signal(self, number: int) -> None:
        if not self._exit.done():
            await self._starter.tell({"op": "signal", "key": self._key, "number": number})

    async def terminate(self, grace_seconds: float) -> None:
        """Returns when nothing of the command runs any more; SandboxUnavailableError when that is not known."""
        # Asked again while the command lives: a process that is just executing another program shows
        # an empty environment, so one look for the mark can miss it.
        until = self._loop.time() + grace_seconds + 10
        while not self._exit.done() and self._loop.time() < until:
            if not await self._terminate_once(grace_seconds):
                return  # nothing of it lives; with no spawner there is nobody to say how it ended
            await asyncio.wait([self._exit], timeout=0.2)
        if not self._exit.done():
            raise self._may_still_run("it was killed and has not ended")
        await self._terminate_once(grace_seconds)  # what outlived the command

    async def _terminate_once(self, grace_seconds: float) -> bool:
        """Whether the spawner did it, which then says how the command ended."""
        pidfd = self._inner.open()
        if pidfd is None:
            await asyncio.wait([self._exit], timeout=10)
            return False
        try:
            message = {
                "op": "terminate",
                "mark": self._mark,
                "grace": grace_seconds,
            }
            try:
                async with asyncio.timeout(grace_seconds + _SPAWNER_SECONDS):
                    with await self._client.request(message, [pidfd]) as reply:
                        said = await reply.next()
            except (SandboxUnavailableError, ResourceExhaustedError, TimeoutError, OSError):
                said = None
            if said is None or "ok" not in said[0]:
                await self._terminate_from_here(pidfd, grace_seconds)
                return False
            return True
        finally:
            os.close(pidfd)

    async def _terminate_from_here(self, pidfd: int, grace_seconds: float) -> None:
        """The same without the spawner, which has ended or does not answer."""
        try:
            await asyncio.to_thread(_end_tree, os.dup(pidfd), self._mark, grace_seconds)
        except ProcessLookupError:
            return  # the sandbox has ended, and everything in it
        except OSError as error:
            if self._inner.alive():
                raise self._may_still_run(error.strerror or str(error)) from error

    def _may_still_run(self, why: str) -> SandboxUnavailableError:
        return SandboxUnavailableError(
            f"the command may still run: {why}. stop() the sandbox to be sure",
            provider="local",
            sandbox_id=self._sandbox_id,
        )

    async def aclose(self) -> None:
        if not self._exit.done():
            self._loop.remove_reader(self._reply.socket.fileno())
            self._reply.close()
            self._exit.cancel()
        self._wake.set()
        if self._stdin is not None and self._stdin not in self._streams:
            os.close(self._stdin)
        self._stdin = None
        for fd in list(self._streams):
            self._drop(fd)


def _end_tree(pidfd: int, mark: str, grace_seconds: float) -> None:
    try:
        processes = open_processes(pidfd)
        try:
            for grace in (grace_seconds, 0.0):  # a process between two programs shows no mark for a moment
                end_tree(processes, mark, grace)
                time.sleep(0.02)
        finally:
            os.close(processes)
    finally:
        os.close(pidfd)


def gone(sandbox_id: str, message: str = "the sandbox has ended", reason: str = "ended") -> SandboxGone:
    return SandboxGone(message, reason=reason, provider="local", sandbox_id=sandbox_id)


def entry_error(message: Message, inner: ProcessMark, sandbox_id: str) -> Exception:
    if message["errno"] == errno.ESRCH or not inner.alive():
        return gone(sandbox_id)
    if message["errno"] == errno.EAGAIN:
        return ResourceExhaustedError(
            "the sandbox has as many processes as it may have; end some, or raise its pids limit",
            provider="local",
            sandbox_id=sandbox_id,
            retryable=True,
        )
    return SandboxFailedError(
        f"could not enter the sandbox: {message['why']}",
        provider="local",
        sandbox_id=sandbox_id,
        reason="enter",
    )


__all__ = ["STDERR", "STDOUT", "LocalProcess", "entry_error", "gone"]
