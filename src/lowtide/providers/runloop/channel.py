"""The way into a devbox: an execution of the program inside, its standard input by requests, its output as events.

Both carry text only, so the program speaks in lines. Standard input comes in one request at a time; what it
prints stands in a log at the service, which is read on from any place when the connection has dropped.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import LABEL_PREFIX
from lowtide.providers.inside import program
from lowtide.providers.runloop.errors import SERVICE
from lowtide.providers.runloop.lookup import CALL_SECONDS

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

WORKING_DIR = LABEL_PREFIX + "cwd"
_PART = 256 * 1024  # of standard input in one request
_QUIET_SECONDS = 60.0
"""After so long without a byte the events are asked for anew: a connection that died in silence says nothing else."""
_BROKEN_SECONDS = 30.0
"""For so long each of them may break at once; then the way in is opened anew, which has a bound of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What has to be known of a devbox to get in."""

    name: str
    """Of the program's socket inside: new for every process of ours, so that each has a server of its own."""
    architecture: str = "x86_64"
    working_dir: str | None = None

    @classmethod
    def of(cls, view: Any) -> Door:
        """From a DevboxView."""
        return cls(
            name=secrets.token_hex(8),
            architecture=getattr(view.launch_parameters, "architecture", None) or "x86_64",
            working_dir=(view.metadata or {}).get(WORKING_DIR),
        )

    def command(self) -> str:
        """Brings the program in where it is not there yet, and becomes it. The key is not in it."""
        line = program.text_line(self.architecture, self.name)
        if self.working_dir is None:
            return line
        place = shlex.quote(self.working_dir)
        return f"mkdir -p -- {place} && cd -- {place} && {line}"


Explain = Callable[[errors.LowtideError], Awaitable[errors.LowtideError]]


class ExecutionChannel:
    """Implements `inside.Channel`."""

    def __init__(self, client: AsyncRunloop, sandbox_id: str, execution_id: str, explain: Explain) -> None:
        self._client, self._sandbox_id, self._execution_id = client, sandbox_id, execution_id
        self._explain = explain
        self._taken = 0
        self._stream: Any = None
        self._pending: asyncio.Task[bytes] | None = None
        self._ended: errors.LowtideError | None = None
        self.closed = asyncio.Event()

    async def send(self, data: bytes) -> None:
        executions = self._client.devboxes.executions
        for part in _parts(data):
            if self.closed.is_set():
                raise ConnectionResetError("the channel was closed")
            work = executions.send_std_in(self._execution_id, devbox_id=self._sandbox_id, text=part)
            await SERVICE.call(CALL_SECONDS, work, "standard input", self._sandbox_id)

    async def receive(self) -> bytes:
        try:
            if not self.closed.is_set():
                self._pending = asyncio.ensure_future(self._next())
                return await self._pending
        except asyncio.CancelledError:
            if not self.closed.is_set():
                raise
        except errors.LowtideError as error:
            raise await self._explain(error) from error
        if self._ended is not None:
            raise self._ended
        return b""

    def close(self, ended: errors.LowtideError | None = None) -> None:
        """`ended`: why, where the sandbox has ended; whoever reads hears it."""
        if not self.closed.is_set():
            self._ended = ended
            self.closed.set()
            if self._pending is not None:
                self._pending.cancel()
            if self._stream is not None:
                self._closing = asyncio.ensure_future(self._stream.close())

    async def _next(self) -> bytes:
        """The next bytes. A stream that drops is read on where it dropped; b"" when the program has left."""
        broken, why = 0.0, "it ended"
        for delay in hosted.backoff(0.01, 1.0):
            if self._stream is None:
                await self.attach()
            over, began = False, time.monotonic()
            try:
                while True:
                    event = await anext(self._stream)
                    if data := (getattr(event, "output", None) or "").encode("utf-8", "surrogateescape"):
                        self._taken += len(data)
                        return data
            except StopAsyncIteration:
                over = True
            except Exception as error:
                if hosted.status_of(error) not in (None, 408):  # 408: it holds this answer no longer
                    raise (SERVICE.translated(error, self._sandbox_id) or error) from error
                why = str(error) or type(error).__name__
            self._stream = None
            if over and await self.left():
                return b""
            if time.monotonic() - began > 1.0:
                broken = 0.0
                continue
            if broken > _BROKEN_SECONDS:
                words = f"what it prints cannot be read: {why}"
                raise SERVICE.error(errors.SandboxUnavailableError, words, self._sandbox_id)
            broken += delay
            await asyncio.sleep(delay)
        raise AssertionError  # `backoff` has no end

    async def attach(self) -> None:
        """Ask for what it prints, from where we are. Counted here: what an event's own offset means is not promised."""
        import httpx
        from runloop_api_client import AsyncStream
        from runloop_api_client.types.devboxes import ExecutionUpdateChunk

        asking = self._client.get(
            f"/v1/devboxes/{self._sandbox_id}/executions/{self._execution_id}/stream_stdout_updates",
            cast_to=ExecutionUpdateChunk,
            options={
                "headers": {"Accept": "text/event-stream"},
                "params": {"offset": str(self._taken)},
                "timeout": httpx.Timeout(_QUIET_SECONDS, connect=5.0),
            },
            stream=True,
            stream_cls=AsyncStream[ExecutionUpdateChunk],
        )
        self._stream = await SERVICE.call(CALL_SECONDS, asking, "output", self._sandbox_id)

    async def left(self) -> bool:
        """Whether the execution is over. One that never got as far as the program says why."""
        executions = self._client.devboxes.executions
        found = await SERVICE.again(
            lambda: executions.retrieve(self._execution_id, devbox_id=self._sandbox_id),
            "the program inside",
            self._sandbox_id,
        )
        if found.status == "completed" and found.exit_status and not self._taken:
            words = (found.stderr or found.stdout or f"exit code {found.exit_status}").strip()[-400:]
            raise SERVICE.failed(self._sandbox_id, f"lowtide's program does not run in it: {words}")
        return bool(found.status == "completed")


async def open_channel(
    client: AsyncRunloop, sandbox_id: str, door: Door, first: bytes, explain: Explain
) -> ExecutionChannel:
    """Two rounds: start it; then say the first words, with the first command in them, while its output is asked for."""
    try:
        work = client.devboxes.execute_async(sandbox_id, command=door.command(), attach_stdin=True)
        started = await SERVICE.call(CALL_SECONDS, work, "the program inside", sandbox_id)
        channel = ExecutionChannel(client, sandbox_id, started.execution_id, explain)
        try:
            await asyncio.gather(channel.send(first), channel.attach())
        except BaseException as error:
            channel.close()
            if isinstance(error, errors.ValidationError):
                await channel.left()  # it takes no input any more: it says why it never ran
            raise
    except errors.LowtideError as error:
        raise await explain(error) from error
    return channel


def _parts(data: bytes) -> Iterator[str]:
    """Whole lines, as many as go into one request."""
    start = 0
    while start < len(data):
        end = len(data) if len(data) - start <= _PART else data.rfind(b"\n", start, start + _PART) + 1
        yield data[start : end or len(data)].decode("ascii")
        start = end or len(data)
