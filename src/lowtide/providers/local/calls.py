"""The seam's commands, files and ports of the local provider: whoever answers for a sandbox is asked. `LocalCalls`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence

from lowtide.providers.base import ProcessHandle, ProcessSpec, Url
from lowtide.providers.local.enter import Entrance
from lowtide.providers.local.file_calls import FileCalls
from lowtide.providers.local.gvisor_calls import GvisorCalls
from lowtide.providers.local.process import gone
from lowtide.providers.optional import FileEntry


class LocalCalls:
    """A part of the provider."""

    def __init__(self, entrance: Entrance, owner: int | None) -> None:
        self._entrance = entrance
        self._file_calls = FileCalls(entrance)
        self._gvisor_calls = GvisorCalls(entrance, owner)

    def forget_calls(self, sandbox_id: str) -> None:
        self._file_calls.forget_calls(sandbox_id)
        self._gvisor_calls.forget_calls(sandbox_id)

    def end_calls(self) -> None:
        self._file_calls.end_calls()
        self._gvisor_calls.end_calls()

    def _calls(self, sandbox_id: str) -> FileCalls | GvisorCalls:
        """Whoever answers for this sandbox. Raises SandboxGone; with gVisor around it, a pause is one of all."""
        if self._entrance.known(sandbox_id).key is None:
            return self._file_calls
        self._entrance.awake(sandbox_id)
        return self._gvisor_calls

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        if self._entrance.known(sandbox_id).key is not None:
            return await self._gvisor_calls.start_process(sandbox_id, spec)
        return await self._entrance.start_process(sandbox_id, spec)

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in self._calls(sandbox_id).read_file(sandbox_id, _absolute(path)):
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
        calls = self._calls(sandbox_id)
        return await calls.write_file(sandbox_id, _absolute(path), chunks, size=size, mode=mode)

    async def write_file_at(
        self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes], *, mode: int, modified: float
    ) -> int:
        calls = self._calls(sandbox_id)
        return await calls.write_file_at(sandbox_id, _absolute(path), chunks, mode=mode, modified=modified)

    async def read_into(
        self, sandbox_id: str, path: str, descriptor: int, *, max_bytes: int | None = None
    ) -> int:
        calls = self._calls(sandbox_id)
        return await calls.read_into(sandbox_id, _absolute(path), descriptor, max_bytes=max_bytes)

    async def write_from(
        self, sandbox_id: str, path: str, descriptor: int, *, mode: int | None = None
    ) -> int:
        return await self._calls(sandbox_id).write_from(sandbox_id, _absolute(path), descriptor, mode=mode)

    async def stat(self, sandbox_id: str, path: str) -> FileEntry:
        return await self._calls(sandbox_id).stat(sandbox_id, _absolute(path))

    async def list_dir(self, sandbox_id: str, path: str) -> Sequence[FileEntry]:
        return await self._calls(sandbox_id).list_dir(sandbox_id, _absolute(path))

    async def make_dir(self, sandbox_id: str, path: str) -> None:
        await self._calls(sandbox_id).make_dir(sandbox_id, _absolute(path))

    async def remove(self, sandbox_id: str, path: str, *, recursive: bool) -> None:
        await self._calls(sandbox_id).remove(sandbox_id, _absolute(path), recursive=recursive)

    async def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in self._calls(sandbox_id).read_tree(sandbox_id, _absolute(path)):
            yield chunk

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        await self._calls(sandbox_id).write_tree(sandbox_id, _absolute(path), chunks)

    async def url(self, sandbox_id: str, port: int) -> Url:
        known = self._entrance.known(sandbox_id)
        if not known.inner.alive():
            raise gone(sandbox_id)
        if known.network:
            return Url(url=f"http://127.0.0.1:{port}")
        host, port = await self._calls(sandbox_id).forward(sandbox_id, port)
        return Url(url=f"http://{host}:{port}")


def _absolute(path: str) -> str:
    return path if path.startswith("/") else "/" + path
