"""The seam's file calls and ports for every provider whose sandboxes hold the program inside: `Calls`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence

from lowtide.providers.inside import files
from lowtide.providers.inside.clients import Clients
from lowtide.providers.inside.forward import Forward
from lowtide.providers.optional import FileEntry


class Calls:
    """A part of a provider. `clients` is where its commands start."""

    def __init__(self, clients: Clients) -> None:
        self.begin_calls(clients)

    def begin_calls(self, clients: Clients) -> None:
        """On a new event loop nothing of the old one can be used."""
        self.clients = clients
        self._forwards: dict[tuple[str, int], Forward] = {}

    def forget_calls(self, sandbox_id: str, *, goodbye: bool = True) -> None:
        for key in [key for key in self._forwards if key[0] == sandbox_id]:
            self._forwards.pop(key).close()
        self.clients.forget(sandbox_id, goodbye=goodbye)

    def end_calls(self) -> None:
        for forward in self._forwards.values():
            forward.close()
        self._forwards.clear()
        self.clients.close()

    async def forward(self, sandbox_id: str, port: int) -> tuple[str, int]:
        """An address on this machine's loopback that leads to the sandbox's port."""
        forward = self._forwards.get((sandbox_id, port))
        if forward is None:
            forward = self._forwards[sandbox_id, port] = Forward(lambda: self.clients.get(sandbox_id), port)
        return forward.address

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for piece in files.read_file(await self.clients.get(sandbox_id), path):
            yield piece

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        client = await self.clients.get(sandbox_id)
        return await files.write_file(client, path, chunks, size=size, mode=mode)

    async def write_file_at(
        self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes], *, mode: int, modified: float
    ) -> int:
        client = await self.clients.get(sandbox_id)
        return await files.write_file(client, path, chunks, mode=mode, modified=modified)

    async def stat(self, sandbox_id: str, path: str) -> FileEntry:
        return await files.stat(await self.clients.get(sandbox_id), path)

    async def list_dir(self, sandbox_id: str, path: str) -> Sequence[FileEntry]:
        return await files.list_dir(await self.clients.get(sandbox_id), path)

    async def make_dir(self, sandbox_id: str, path: str) -> None:
        await files.make_dir(await self.clients.get(sandbox_id), path)

    async def remove(self, sandbox_id: str, path: str, *, recursive: bool) -> None:
        await files.remove(await self.clients.get(sandbox_id), path, recursive=recursive)

    async def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for piece in files.read_tree(await self.clients.get(sandbox_id), path):
            yield piece

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        await files.write_tree(await self.clients.get(sandbox_id), path, chunks)
