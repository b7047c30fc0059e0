"""The way into a container: an exec of the program inside that hands its streams to PID 1."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError, ResourceExhaustedError, SandboxUnavailableError
from lowtide.providers.base import Labels
from lowtide.providers.docker import container, ended
from lowtide.providers.docker.client import Frames
from lowtide.providers.docker.errors import SERVICE, mapped
from lowtide.providers.inside.program import KEY, READER

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider


class ExecChannel:
    """Implements `inside.Channel`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sandbox_id: str) -> None:
        self._frames, self._writer, self._sandbox_id = Frames(reader), writer, sandbox_id
        self._heard = False

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        while (chunk := await self._frames.next()) is not None:
            # On standard output, by the engine, in the place of all else: later it may be in somebody's file.
            if not self._heard and chunk[1].startswith(b"OCI runtime exec failed"):
                words = chunk[1][:400].decode(errors="replace")
                raise SERVICE.error(
                    ResourceExhaustedError,
                    f"the engine could not start anything in the sandbox: {words}",
                    self._sandbox_id,
                )
            if chunk[0] == 1:
                self._heard = True
                return chunk[1]
        return b""

    def close(self) -> None:
        self._writer.transport.abort()


async def open_channel(provider: DockerProvider, sandbox_id: str, first: bytes) -> ExecChannel:
    """As a user who may execute the program and not read it: nothing in the sandbox can look into it."""
    client = await provider.client()
    if sandbox_id in provider.asleep:
        raise ended.paused(sandbox_id)
    channel: ExecChannel | None = None
    try:
        with mapped(sandbox_id):
            box = await provider.container_id(sandbox_id)
            made = await client.exec(box, (container.PROGRAM, "attach"), READER)
            channel = ExecChannel(*await client.attach(made), sandbox_id)
            await channel.send(first)
    except BaseException as error:
        if channel is not None:
            channel.close()
        if not isinstance(error, LowtideError):
            raise
        raise await ended.explained(provider, sandbox_id, error) from error.__cause__
    return channel


async def key_of(provider: DockerProvider, sandbox_id: str) -> bytes:
    """The sandbox's key, as the engine knows it from the create call. Nothing inside can read it there."""
    return key_in(await provider.inspect(sandbox_id), sandbox_id)


def key_in(facts: Mapping[str, Any], sandbox_id: str) -> bytes:
    config = facts.get("Config", {})
    if Labels.from_dict(container.own_labels(config.get("Labels"))) is not None:
        for line in config.get("Env") or ():
            name, _, value = line.partition("=")
            if name == KEY:
                with suppress(ValueError):
                    return bytes.fromhex(value)
    words = "this container has no key: it was made by another version of lowtide"
    raise SERVICE.error(SandboxUnavailableError, words, sandbox_id, retryable=False)
