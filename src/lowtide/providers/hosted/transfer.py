"""Large files by a service's own transfer: counted on their way, and put into their place by the program inside."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import posixpath
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import BinaryIO

from lowtide import errors
from lowtide.providers.hosted.service import Service, let_go
from lowtide.providers.inside import Client, Clients, files
from lowtide.providers.inside.calls import Calls

IDLE_SECONDS = 120.0
"""How long a transfer may stand still."""
SMALL_BYTES = 256 << 10
"""Up to here one round trip to the program inside does it; what is under way there is never more."""
_REMOVE_SECONDS = 10.0
_LATE_SECONDS = (0.5, 2.0, 8.0)
_LATE: set[asyncio.Future[None]] = set()


class BulkFiles(Calls):
    """A part of a provider whose service takes whole files faster than the program's channel does."""

    async def send_file(self, sandbox_id: str, path: str, source: Counted) -> None:
        """Have the service write it there, in place. Raises LowtideError."""
        raise NotImplementedError

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        if size is not None and size <= SMALL_BYTES:
            return await super().write_file(sandbox_id, path, chunks, size=size, mode=mode)
        return await self._write(sandbox_id, path, chunks, size=size, mode=mode)

    async def write_file_at(
        self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes], *, mode: int, modified: float
    ) -> int:
        return await self._write(sandbox_id, path, chunks, mode=mode, modified=modified)

    async def _write(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None,
        modified: float | None = None,
    ) -> int:
        rest = aiter(chunks)
        begun = await _begun(rest)
        source = Counted(rest, begun)
        client = functools.partial(self.clients.get, sandbox_id)
        if len(begun) <= SMALL_BYTES or not path.startswith("/") or not is_text(path):
            return await files.write_file(
                await client(), path, source, size=size, mode=mode, modified=modified
            )
        await files.check_write(await client(), path)
        # Beside its place first, because a service writes in place; made by the program, so that it has the right owner.
        aside = posixpath.join(posixpath.dirname(path), f".lowtide-{secrets.token_hex(8)}.part")
        try:
            await files.write_file(await client(), aside, _nothing(), size=0)
            await self.send_file(sandbox_id, aside, source)
            if size is not None and source.bytes != size:
                words = f"{path}: {source.bytes} bytes came where {size} were announced; nothing was replaced"
                raise errors.SandboxFileError(words, path=path, sandbox_id=sandbox_id)
            await files.replace_file(await client(), path, aside, mode=mode, modified=modified)
        except BaseException:
            # Before anybody hears of the end, so that nothing of it is left by then.
            await asyncio.shield(asyncio.ensure_future(_removed(client, aside)))
            late = asyncio.ensure_future(_removed_late(self.clients, sandbox_id, aside))
            _LATE.add(late)
            late.add_done_callback(_LATE.discard)
            raise
        return source.bytes


def is_text(path: str) -> bool:
    """Whether a protocol of text can carry it."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


async def _begun(chunks: AsyncIterator[bytes]) -> bytes:
    """The first of them: all, where that is not more than is small."""
    begun = b""
    async for chunk in chunks:
        begun += bytes(chunk)
        if len(begun) > SMALL_BYTES:
            break
    return begun


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _removed(client: Callable[[], Awaitable[Client]], path: str) -> None:
    with contextlib.suppress(Exception):  # the sandbox may be gone, which is why the transfer failed
        async with asyncio.timeout(_REMOVE_SECONDS):
            await files.remove(await client(), path, recursive=False)


async def _removed_late(clients: Clients, sandbox_id: str, path: str) -> None:
    """Once more: a request that was given up may reach the service only then, and it makes the file anew."""
    for seconds in _LATE_SECONDS:
        await asyncio.sleep(seconds)
        if clients.known(sandbox_id) is None:  # nobody is to be woken up for it
            return
        await _removed(functools.partial(clients.get, sandbox_id), path)


class Counted:
    """Chunks on their way to a service, after what was `begun` already, and what became of them."""

    def __init__(self, chunks: AsyncIterable[bytes], begun: bytes = b"") -> None:
        self._chunks, self._begun = chunks, begun
        self.bytes = 0
        self.moved = 0
        self.error: BaseException | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._begun:
            self.moved, self.bytes = 1, len(self._begun)
            yield self._begun
        try:
            async for chunk in self._chunks:
                self.moved += 1
                self.bytes += len(chunk)
                yield bytes(chunk)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise

    def read_from(self, file: BinaryIO) -> io.FileIO:
        """What was put into a file of this machine first, for an SDK that takes no stream: it moves as it is read."""
        counted = self

        class Moving(io.FileIO):
            def read(self, size: int | None = -1, /) -> bytes:
                counted.moved += 1
                return super().read(-1 if size is None else size)

        return Moving(file.fileno(), closefd=False)

    async def watched(
        self,
        sending: Awaitable[object],
        *,
        service: Service,
        sandbox_id: str,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Until `sending` has sent them: for as long as it takes, while they move. Raises the source's own error."""
        call = asyncio.ensure_future(sending)
        try:
            before = -1
            while not (await asyncio.wait({call}, timeout=idle_seconds))[0]:
                if self.moved == before:
                    raise errors.RequestTimeoutError(
                        f"{service.name} took no data for {idle_seconds:g} s",
                        provider=service.provider,
                        sandbox_id=sandbox_id,
                    )
                before = self.moved
            call.result()
        except BaseException:
            if self.error is not None:  # which a transport wraps
                raise self.error from None
            raise
        finally:
            if not call.done():
                let_go(call)
