"""The channel into a container, over a connection that the test feeds: what the engine says, and what the sandbox does."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lowtide.errors import ResourceExhaustedError
from lowtide.providers.docker.channel import ExecChannel

REFUSAL = b"OCI runtime exec failed: exec failed: cannot allocate memory"


def frame(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(data)) + data


@asynccontextmanager
async def channel(*parts: bytes) -> AsyncIterator[ExecChannel]:
    """One whose other side says these, each by itself, and hangs up."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield (found := ExecChannel(reader, writer, "box"))
        found.close()


async def everything(one: ExecChannel) -> bytes:
    heard = b""
    while piece := await one.receive():
        heard += piece
    return heard


async def test_what_the_engine_could_not_start_is_told() -> None:
    async with channel(frame(1, REFUSAL)) as one:
        with pytest.raises(ResourceExhaustedError, match="cannot allocate memory"):
            await one.receive()


async def test_the_same_words_in_what_the_sandbox_sends_are_its_own() -> None:
    async with channel(frame(1, b"first"), frame(1, REFUSAL)) as one:
        assert await everything(one) == b"first" + REFUSAL


async def test_frames_come_in_any_pieces_and_standard_error_is_left_out() -> None:
    said = frame(1, b"a" * 100_000) + frame(2, b"noise") + frame(1, b"") + frame(1, b"end")
    async with channel(*(said[at : at + 7001] for at in range(0, len(said), 7001))) as one:
        assert await everything(one) == b"a" * 100_000 + b"end"


async def test_a_frame_that_breaks_off_is_an_end() -> None:
    for cut in (3, 8, 12):
        async with channel(frame(1, b"whole"), frame(1, b"broken")[:cut]) as one:
            assert (await everything(one)).startswith(b"whole")
