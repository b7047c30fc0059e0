"""The way into a sandbox: a streamed exec of the program inside that hands its streams to the main process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError, RequestTimeoutError, SandboxUnavailableError
from lowtide.providers.coreweave.access import messages
from lowtide.providers.coreweave.create import PLACE
from lowtide.providers.coreweave.errors import DOMAIN, SERVICE
from lowtide.providers.hosted import backoff
from lowtide.providers.hosted import forked_grpc as forked
from lowtide.providers.hosted.grpc_calls import refusal
from lowtide.providers.inside import program

if TYPE_CHECKING:
    from lowtide.providers.coreweave.provider import CoreWeaveProvider

_PIECE = 64 << 10
"""The most that the service takes of standard input at once."""
_START_SECONDS = 20.0
"""How long the main process may take from running to answering: it unpacks itself first."""
_READY_SECONDS = 10.0
_ATTACH = program.attach_words(PLACE)


class ExecChannel:
    """Implements `inside.Channel`."""

    def __init__(self, call: Any, sandbox_id: str) -> None:
        self._call, self._sandbox_id, self._grpc = call, sandbox_id, forked.grpc()
        self._first: bytes | None = None
        self.said = ""
        """What came on standard error, and how it ended: for an error's words."""

    async def open(self, first: bytes, *, alone: bool) -> bool:
        """Whether the program answers. Raises what the service does. `alone`: nobody can read an environment there yet."""
        pb = messages()
        said = program.first_variable(first) if alone else {}
        init = pb.ExecStreamInit(sandbox_id=self._sandbox_id, command=_ATTACH, env=said)
        await self._write(pb.ExecStreamRequest(init=init))
        with SERVICE.mapped(self._sandbox_id):
            async with asyncio.timeout(_READY_SECONDS):
                ready = await self._next()
        if ready is None or not ready.HasField("ready"):
            self._hear(ready)
            return False
        if not said:
            await self.send(first)
        self._first = await self.receive()
        return bool(self._first)

    async def send(self, data: bytes) -> None:
        pb = messages()
        for at in range(0, len(data), _PIECE):
            await self._write(pb.ExecStreamRequest(stdin=data[at : at + _PIECE]))

    async def receive(self) -> bytes:
        if self._first is not None:
            data, self._first = self._first, None
            return data
        while (message := await self._next()) is not None:
            if message.HasField("output") and message.output.stream == message.output.STREAM_STDOUT:
                if message.output.data:
                    return bytes(message.output.data)
            elif not self._hear(message):
                break
        return b""

    def close(self) -> None:
        self._call.cancel()

    def _hear(self, message: Any) -> bool:
        """Whether more may come."""
        if message is None:
            return False
        if message.HasField("output"):
            self.said = (self.said + message.output.data.decode("utf-8", "replace"))[-400:]
            return True
        if message.HasField("error"):
            self.said += f" {message.error.message[:400]}"
            return False
        return not message.HasField("exit")

    async def _next(self) -> Any:
        """The next message; None at the end."""
        message = await self._told(self._call.read())
        return None if message is self._grpc.aio.EOF else message

    async def _write(self, message: Any) -> None:
        await self._told(self._call.write(message))

    async def _told(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What the call does, with its errors as lowtide's."""
        with SERVICE.mapped(self._sandbox_id):
            try:
                return await work
            except self._grpc.RpcError as error:
                raise refusal(error, DOMAIN) from error
            except asyncio.InvalidStateError as error:
                raise ConnectionResetError("the stream is over") from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Not we were cancelled: the call was, by its end or by that of its connection.
                raise ConnectionResetError("the stream was given up") from error


async def open_channel(provider: CoreWeaveProvider, sandbox_id: str, first: bytes) -> ExecChannel:
    """Once the main process listens. What is refused meanwhile, the control plane explains; what may pass is
    tried again: the program drops what it has heard already."""
    alone = provider.alone(sandbox_id)
    deadline = time.monotonic() + _START_SECONDS
    for delay in backoff(0.005, 0.5):
        connections = await provider.connections()
        call = connections.stream("StreamExec")
        channel = ExecChannel(call, sandbox_id)
        failure: LowtideError | None = None
        try:
            if await channel.open(first, alone=alone):
                return channel
        except LowtideError as error:
            if isinstance(error, RequestTimeoutError):
                connections.give_up(call)
            failure = await provider.explained(sandbox_id, error)
            failure.__cause__ = failure.__cause__ or error.__cause__
        except BaseException:
            channel.close()
            raise
        channel.close()
        if time.monotonic() > deadline or (failure is not None and not failure.retryable):
            break
        await asyncio.sleep(delay)
    if failure is None:
        words = f"no program of lowtide answers in the sandbox: {channel.said.strip() or 'it ended'}"
        failure = SandboxUnavailableError(words, provider=SERVICE.provider, sandbox_id=sandbox_id)
        failure = await provider.explained(sandbox_id, failure)
    raise failure
