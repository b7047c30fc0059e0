"""The way into a sandbox: an exec of the program inside that hands its streams to the main process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from lowtide import errors
from lowtide.providers.inside import program
from lowtide.providers.modal.errors import SERVICE

_OPEN_SECONDS = 60.0
_CLOSING_SECONDS = 5.0
_PIECE = 1 << 20


class ExecChannel:
    """Implements `inside.Channel`."""

    def __init__(self, process: Any, sandbox_id: str, ending: Callable[[], bool]) -> None:
        self._process, self._sandbox_id, self._ending = process, sandbox_id, ending
        self._output = process.stdout.__aiter__()
        self._closing: asyncio.Task[None] | None = None

    async def send(self, data: bytes) -> None:
        with SERVICE.mapped(self._sandbox_id):
            for at in range(0, len(data), _PIECE):
                self._process.stdin.write(data[at : at + _PIECE])
                await self._process.stdin.drain.aio()

    async def receive(self) -> bytes:
        try:
            with SERVICE.mapped(self._sandbox_id):
                while not (data := await anext(self._output)):
                    pass
        except StopAsyncIteration:
            return b""
        return bytes(data)

    def close(self) -> None:
        """Tells the program that nobody listens any more, unless it is ending anyway: that is a request."""
        if self._closing is None and not self._ending():
            with contextlib.suppress(RuntimeError):  # the loop is over
                self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSING_SECONDS):
                self._process.stdin.write_eof()
                await self._process.stdin.drain.aio()


async def open_channel(
    sandbox: Any, sandbox_id: str, place: str, first: bytes, *, alone: bool, ending: Callable[[], bool]
) -> ExecChannel:
    """`alone`: nothing runs in there yet that could read the first words in an environment: they go along."""
    said = program.first_variable(first) if alone else {}
    opening = sandbox.exec.aio(*program.attach_words(place), text=False, env=said or None)
    process = await SERVICE.call(_OPEN_SECONDS, opening, "open a channel", sandbox_id)
    channel = ExecChannel(process, sandbox_id, ending)
    try:
        if not said:
            await channel.send(first)
    except BaseException as error:
        channel.close()
        if isinstance(error, errors.LowtideError) or not isinstance(error, OSError):
            raise
        raise errors.SandboxUnavailableError(
            f"the way into the sandbox broke: {error}", provider=SERVICE.provider, sandbox_id=sandbox_id
        ) from error
    return channel
