"""Commands, files and ports of a sandbox behind gVisor: through the program inside, over an exec of runsc's."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from lowtide.errors import LowtideError, SandboxFailedError, SandboxUnavailableError, ValidationError
from lowtide.in_background import in_background
from lowtide.providers.base import STDOUT, Capability, ProcessHandle, ProcessSpec
from lowtide.providers.inside import Clients
from lowtide.providers.inside.calls import Calls
from lowtide.providers.local import gvisor
from lowtide.providers.local.enter import Entrance
from lowtide.providers.local.process import LocalProcess, gone
from lowtide.providers.local.sandbox_directory import SandboxDirectory
from lowtide.providers.local.wait_readable import readable
from lowtide.trees import holes
from lowtide.trees.walk import TooLarge

_START_SECONDS = 25.0
_MOMENT_SECONDS = 0.01
_ERROR_BYTES = 2000
_BLOCK = 1 << 20


class GvisorCalls(Calls):
    """For the sandboxes of one provider that were made with this isolation."""

    def __init__(self, entrance: Entrance, owner: int | None) -> None:
        self._entrance, self._owner = entrance, owner
        super().__init__(Clients("local", self._open_channel, self._key))

    async def wait_ready(self, sandbox_id: str) -> None:
        """Until its first command can run."""
        try:
            await self.stat(sandbox_id, "/")
        except SandboxUnavailableError as error:
            raise SandboxFailedError(
                f"gVisor could not be started: {error}",
                provider="local",
                sandbox_id=sandbox_id,
                reason="start",
            ) from error

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        known = self._entrance.awake(sandbox_id)
        if spec.tty is not None:
            raise gvisor.together(Capability.TTY.value, "run the command without tty=True")
        if self._owner is None and spec.user not in (None, "root", "0"):
            raise ValidationError(
                f"an ordinary user's sandbox has only the user root, and not {spec.user}",
                argument="user",
                provider="local",
                sandbox_id=sandbox_id,
            )
        client = await self.clients.get(sandbox_id)
        return await client.start(replace(spec, cwd=spec.cwd or known.working_dir))

    async def pause(self, sandbox_id: str, directory: SandboxDirectory, word: str) -> None:
        """`pause` or `resume`."""
        if directory.paused() == (word == "pause"):
            return
        await self._tell(sandbox_id, word)
        directory.set_paused(word == "pause")

    async def ask_to_end(self, sandbox_id: str, grace_seconds: float) -> None:
        """Its main command, or else everything in it, and wait as long. Silent when it has ended meanwhile."""
        with contextlib.suppress(LowtideError, TimeoutError):
            async with asyncio.timeout(grace_seconds):
                pidfd = self._entrance.awake(sandbox_id).inner.open()
                if pidfd is None:
                    return
                try:
                    await self._tell(sandbox_id, "kill", "TERM")
                    await readable(pidfd)
                finally:
                    os.close(pidfd)

    async def _tell(self, sandbox_id: str, *words: str) -> None:
        spec = ProcessSpec(argv=gvisor.tell(*words, owner=self._owner))
        process = await self._entrance.start_process(sandbox_id, spec, whole=True)
        try:
            said = b"".join([data async for _, data in process.output()])
            if await process.wait() != 0:
                raise _refused(sandbox_id, f"gVisor does not {words[0]} it", said)
        finally:
            await process.aclose()

    async def read_into(
        self, sandbox_id: str, path: str, descriptor: int, *, max_bytes: int | None = None
    ) -> int:
        count = 0
        with os.fdopen(os.dup(descriptor), "wb", buffering=_BLOCK) as file:
            async for chunk in self.read_file(sandbox_id, path):
                count += len(chunk)
                if max_bytes is not None and count > max_bytes:
                    raise TooLarge
                holes.write_or_skip(file, chunk)
            holes.finish(file)
        return count

    async def write_from(
        self, sandbox_id: str, path: str, descriptor: int, *, mode: int | None = None
    ) -> int:
        info = os.fstat(descriptor)
        chunks = _blocks(descriptor, info.st_size or None)
        mode = info.st_mode & 0o7777 if mode is None else mode
        return await self.write_file_at(sandbox_id, path, chunks, mode=mode, modified=info.st_mtime)

    async def _key(self, sandbox_id: str) -> bytes:
        key = self._entrance.awake(sandbox_id).key
        if key is None:
            raise gone(sandbox_id)
        return key

    async def _open_channel(self, sandbox_id: str, first: bytes) -> ExecChannel:
        """Tried again while the container is being started: runsc knows none before, and says so at once."""
        until = asyncio.get_running_loop().time() + _START_SECONDS
        pause = _MOMENT_SECONDS
        while True:
            spec = ProcessSpec(argv=gvisor.attach(owner=self._owner), stdin=True, drain_seconds=0.0)
            channel = ExecChannel(
                await self._entrance.start_process(sandbox_id, spec, whole=True),
                sandbox_id,
                self._entrance.known(sandbox_id).inner.alive,
            )
            try:
                with contextlib.suppress(BrokenPipeError):
                    await channel.send(first)
                if await channel.answers():
                    return channel
            except BaseException:
                channel.close()
                raise
            channel.close()
            if asyncio.get_running_loop().time() > until:
                raise _refused(sandbox_id, "nothing could be started in the sandbox", channel.said)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.2)


class ExecChannel:
    """Implements `inside.Channel`."""

    def __init__(self, process: LocalProcess, sandbox_id: str, alive: Callable[[], bool]) -> None:
        self._process, self._sandbox_id, self._alive = process, sandbox_id, alive
        self._output = process.output()
        self._next = b""
        self.said = b""
        """On standard error, which only runsc has."""

    async def send(self, data: bytes) -> None:
        await self._process.write_stdin(data)

    async def answers(self) -> bool:
        """Wait for the first bytes. False: it has ended without any."""
        self._next = await self.receive()
        return bool(self._next)

    async def receive(self) -> bytes:
        data, self._next = self._next, b""
        while not data:
            chunk = await anext(self._output, None)
            if chunk is None:
                if not self._alive():
                    raise gone(self._sandbox_id)
                return b""
            if chunk[0] == STDOUT:
                data = chunk[1]
            else:
                self.said = (self.said + chunk[1])[-_ERROR_BYTES:]
                await asyncio.sleep(0)  # it may be hostile code's, without an end
        return data

    def close(self) -> None:
        """Its input ends, and with it the exec."""
        in_background(self._process.aclose())


async def _blocks(descriptor: int, size: int | None) -> AsyncIterator[bytes]:
    at = 0
    while size is None or at < size:
        wanted = _BLOCK if size is None else min(_BLOCK, size - at)
        data = os.pread(descriptor, wanted, at)
        if not data:
            return
        at += len(data)
        yield data


def _refused(sandbox_id: str, what: str, said: bytes) -> SandboxUnavailableError:
    words = said.decode("utf-8", "replace").strip()
    return SandboxUnavailableError(
        f"{what}{': ' + words if words else ''}", provider="local", sandbox_id=sandbox_id, retryable=True
    )
