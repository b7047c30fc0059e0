"""Large files by a service's own transfer, with the program inside itself and a service that is late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.inside_program import serving

from lowtide.providers.hosted import transfer
from lowtide.providers.inside import Clients


class Late(transfer.BulkFiles):
    """Takes a request that was given up only after what it was for has been removed."""

    arrived: asyncio.Task[None]

    async def send_file(self, sandbox_id: str, path: str, source: transfer.Counted) -> None:
        async def arrive() -> None:
            while Path(path).exists():
                await asyncio.sleep(0.001)
            Path(path).write_bytes(b"half")

        self.arrived = asyncio.ensure_future(arrive())
        raise ConnectionError("given up")


async def _chunks() -> AsyncIterator[bytes]:
    yield b"x" * (transfer.SMALL_BYTES + 1)


async def test_what_a_late_request_makes_anew_is_removed(tmp_path: Path) -> None:
    async with serving() as inside:

        async def key(sandbox_id: str) -> bytes:
            return b"k" * 16

        async def opened(sandbox_id: str, first: bytes) -> object:
            return await inside.open(first)

        clients = Clients("test", opened, key)  # type: ignore[arg-type]
        late = Late(clients)
        try:
            with pytest.raises(ConnectionError):
                await late.write_file("here", str(tmp_path / "file"), _chunks())
            await late.arrived
            assert list(tmp_path.iterdir())
            async with asyncio.timeout(60):
                while list(tmp_path.iterdir()):
                    await asyncio.sleep(0.01)
        finally:
            client = clients.known("here")
            inside.clients += [client] if client is not None else []
