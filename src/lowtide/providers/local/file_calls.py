"""The seam's file calls and ports for a sandbox of namespaces alone: opened inside, streamed here."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence

from lowtide.providers.local import files
from lowtide.providers.local.enter import Entrance
from lowtide.providers.local.ports import Forwarder
from lowtide.providers.optional import FileEntry


class FileCalls:
    """The same calls as `inside.Calls`."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance
        self._forwarders: dict[tuple[str, int], tuple[Forwarder, int]] = {}

    def forget_calls(self, sandbox_id: str) -> None:
        for key in [key for key in self._forwarders if key[0] == sandbox_id]:
            self._forwarders.pop(key)[0].close()

    def end_calls(self) -> None:
        for forwarder, _ in self._forwarders.values():
            forwarder.close()
        self._forwarders.clear()

    async def forward(self, sandbox_id: str, port: int) -> tuple[str, int]:
        """An address on this machine's loopback that leads to the sandbox's port."""
        entry = self._forwarders.get((sandbox_id, port))
        if entry is None:
            forwarder = Forwarder(self._entrance.inside(sandbox_id), port)
            entry = self._forwarders[sandbox_id, port] = (forwarder, await forwarder.start())
        return "127.0.0.1", entry[1]

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in files.read_file(self._entrance.inside(sandbox_id), path):
            yield chunk

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        return await files.write_file(self._entrance.inside(sandbox_id), path, chunks, mode)

    async def write_file_at(
        self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes], *, mode: int, modified: float
    ) -> int:
        return await files.write_file(self._entrance.inside(sandbox_id), path, chunks, mode, modified)

    async def read_into(
        self, sandbox_id: str, path: str, descriptor: int, *, max_bytes: int | None = None
    ) -> int:
        return await files.read_into(self._entrance.inside(sandbox_id), path, descriptor, max_bytes)

    async def write_from(
        self, sandbox_id: str, path: str, descriptor: int, *, mode: int | None = None
    ) -> int:
        return await files.write_from(self._entrance.inside(sandbox_id), path, descriptor, mode)

    async def stat(self, sandbox_id: str, path: str) -> FileEntry:
        return await files.stat(self._entrance.inside(sandbox_id), path)

    async def list_dir(self, sandbox_id: str, path: str) -> Sequence[FileEntry]:
        return await files.list_dir(self._entrance.inside(sandbox_id), path)

    async def make_dir(self, sandbox_id: str, path: str) -> None:
        await files.simple(self._entrance.inside(sandbox_id), "make_dir", path)

    async def remove(self, sandbox_id: str, path: str, *, recursive: bool) -> None:
        await files.simple(self._entrance.inside(sandbox_id), "remove", path, recursive=recursive)

    async def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in files.read_tree(self._entrance.inside(sandbox_id), path):
            yield chunk

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        await files.write_tree(self._entrance.inside(sandbox_id), path, chunks)
