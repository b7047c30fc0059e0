"""The standing connections into all sandboxes of a provider, and our program's own calls over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError, SandboxUnavailableError
from lowtide.providers.base import ProcessSpec, SandboxState
from lowtide.providers.docker import endings, inside
from lowtide.providers.docker.answer import Answer
from lowtide.providers.docker.channel import Channel, ChannelProcess
from lowtide.providers.docker.client import EngineClient, RawStream, checked_id

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider


class Channels:
    """One per provider and event loop."""

    def __init__(self, provider: DockerProvider) -> None:
        self._provider = provider
        self._channels: dict[str, asyncio.Task[Channel]] = {}
        self.asleep: set[str] = set()
        """Sandboxes this process has paused: nothing in them answers."""

    def forget(self, sandbox_id: str) -> None:
        """It is ending: the connection breaks with the container, and tells its commands then."""
        self._channels.pop(sandbox_id, None)
        self.asleep.discard(sandbox_id)

    def close(self) -> None:
        for opening in self._channels.values():
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            opening.cancel()
        self._channels.clear()

    async def start(self, sandbox_id: str, spec: ProcessSpec) -> ChannelProcess:
        for last in (False, True):
            channel = await self.open(sandbox_id)
            try:
                async with asyncio.timeout(10):
                    return await channel.start(spec)
            except BrokenPipeError:
                self._channels.pop(sandbox_id, None)  # it broke since it was last used
            except TimeoutError as error:
                info = await self._provider.get(sandbox_id)
                if info.state is SandboxState.PAUSED:
                    raise endings.paused(sandbox_id) from error
                if last:
                    raise
        raise SandboxUnavailableError(
            "the connection into the sandbox broke", provider="docker", sandbox_id=sandbox_id
        )

    async def open(self, sandbox_id: str) -> Channel:
        """The standing connection into a sandbox; opened once, by whoever comes first."""
        client = await self._provider.client()
        if sandbox_id in self.asleep:
            raise endings.paused(sandbox_id)
        opening = self._channels.get(sandbox_id)
        if opening is not None and opening.done() and (opening.exception() or not opening.result().alive):
            opening = None
        if opening is None:
            opening = self._channels[sandbox_id] = client.loop.create_task(
                self._open_channel(client, sandbox_id)
            )
            opening.add_done_callback(_seen)
        return await asyncio.shield(opening)

    async def _open_channel(self, client: EngineClient, sandbox_id: str) -> Channel:
        channel = Channel(
            client, checked_id(sandbox_id), lambda error: endings.lost(self._provider, sandbox_id, error)
        )
        try:
            with client.translated(sandbox_id):
                await channel.open()
        except LowtideError as error:
            channel.close()
            raise await endings.explained(self._provider, sandbox_id, error) from error.__cause__
        return channel

    async def ask(self, sandbox_id: str, *command: str, user: str) -> int:
        """Run our program for a word of answer: 0, or the error number."""
        client = await self._provider.client()
        stream = RawStream()
        try:
            with client.translated(sandbox_id):
                made = await client.container(checked_id(sandbox_id)).exec(
                    [inside.PROGRAM, *command], user=user
                )
                await client.attach(f"exec/{made.id}/start", {"Detach": False, "Tty": False}, stream)
                words = await Answer(stream, command[0], sandbox_id).line()
        finally:
            stream.close()
        return 0 if words[0] == "ok" else int(words[1])

    @asynccontextmanager
    async def call(
        self, sandbox_id: str, command: Sequence[str], *, stdin: bool = False
    ) -> AsyncIterator[ChannelProcess]:
        """Run our program in the container and talk to it."""
        spec = ProcessSpec(argv=(inside.PROGRAM, *command), stdin=stdin)
        process = await self.start(sandbox_id, spec)
        try:
            yield process
        finally:
            if stdin:
                await _finished(process)
            process.close()


async def _finished(process: ChannelProcess) -> None:
    """Let it notice that no more comes, so that it removes what it had half written."""
    process.write_eof()
    with suppress(LowtideError, TimeoutError):
        async with asyncio.timeout(5):
            while await process.next() is not None:
                pass


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
