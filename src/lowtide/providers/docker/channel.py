"""The way into a container: an exec of the program inside that hands its streams to PID 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.errors import LowtideError, ResourceExhaustedError, SandboxUnavailableError
from lowtide.providers.base import Labels
from lowtide.providers.docker import container, ended
from lowtide.providers.docker.client import RawStream, checked_id
from lowtide.providers.inside.program import KEY, READER

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider


class ExecChannel:
    """Implements `inside.Channel`."""

    def __init__(self, stream: RawStream, sandbox_id: str) -> None:
        self._stream, self._sandbox_id = stream, sandbox_id

    async def send(self, data: bytes) -> None:
        await self._stream.write(data)

    async def receive(self) -> bytes:
        while (chunk := await self._stream.next()) is not None:
            if chunk[1].startswith(b"OCI runtime exec failed"):  # on standard output, by the engine
                raise ResourceExhaustedError(
                    f"the engine could not start anything in the sandbox: {chunk[1][:400].decode(errors='replace')}",
                    provider="docker",
                    sandbox_id=self._sandbox_id,
                )
            if chunk[0] == 1:
                return chunk[1]
        return b""

    def close(self) -> None:
        self._stream.close()


async def open_channel(provider: DockerProvider, sandbox_id: str, first: bytes) -> ExecChannel:
    """As a user who may execute the program and not read it: nothing in the sandbox can look into it."""
    client = await provider.client()
    if sandbox_id in provider.asleep:
        raise ended.paused(sandbox_id)
    stream = RawStream()
    try:
        with client.translated(sandbox_id):
            box = client.container(checked_id(sandbox_id))
            made = await box.exec([container.PROGRAM, "attach"], stdin=True, user=READER)
            await client.attach(f"exec/{made.id}/start", {"Detach": False, "Tty": False}, stream)
            await stream.write(first)
    except BaseException as error:
        stream.close()
        if not isinstance(error, LowtideError):
            raise
        raise await ended.explained(provider, sandbox_id, error) from error.__cause__
    return ExecChannel(stream, sandbox_id)


async def key_of(provider: DockerProvider, sandbox_id: str) -> bytes:
    """The sandbox's key, as the engine knows it from the create call. Nothing inside can read it there."""
    facts = await provider.inspect(sandbox_id)
    config = facts.get("Config", {})
    if Labels.from_dict(container.own_labels(config.get("Labels"))) is not None:
        for line in config.get("Env") or ():
            name, _, value = line.partition("=")
            if name == KEY:
                return bytes.fromhex(value)
    raise SandboxUnavailableError(
        "this container has no key: it was made by another version of lowtide",
        provider="docker",
        sandbox_id=sandbox_id,
        retryable=False,
    )
