"""The runtime's end against an action server that is none of ours: nonsense, too much, and an end in the middle."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lowtide.actionserver.models import Run
from lowtide.errors import LowtideError, SandboxError, SandboxFileError, ValidationError
from lowtide.providers.base import STDERR, STDOUT
from lowtide.runtime import client as client_module
from lowtide.runtime import relay as relay_module
from lowtide.runtime.client import ActionClient
from lowtide.runtime.relay import Relay

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[ActionClient]:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = ActionClient(lambda: asyncio.open_connection("127.0.0.1", port, limit=64 << 20), "key")
    try:
        yield client
    finally:
        await client.aclose()
        server.close()


def saying(data: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()

    return answer


def whole(body: object) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(data: bytes) -> bytes:
    return CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


NONSENSE = [
    b"hello\r\n\r\n",
    b"HTTP/1.1 abc OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    CHUNKED + b"zz\r\n",
    CHUNKED + b"-2\r\n",
    b"HTTP/1.1 500 X\r\nContent-Length: 50000\r\n\r\n" + b"[" * 50_000,
    whole(b"nope"),
    whole(b"[" * 50_000),
    whole(None),
    whole([]),
    whole({"observation": "zz"}),
    whole({"observation": "run", "extras": []}),
    whole({"observation": "run", "extras": {"metadata": 3}}),
    whole({"observation": "run", "extras": {"metadata": {"exit_code": "zero"}}}),
    whole({"observation": "run", "content": 5}),
    whole({"observation": "list", "extras": {"files": 3}}),
]
EVENTS = [b"zz\n\n", b"\xff\n\n", b"event: error\ndata: []\n\n", b"", b"event: output\ndata: {}\n\n"]


@pytest.mark.parametrize("data", NONSENSE)
async def test_nonsense_is_an_error_of_ours(data: bytes) -> None:
    async with answering(saying(data)) as client:
        with pytest.raises(LowtideError):
            await client.execute(Run(command="x"), seconds=60)


@pytest.mark.parametrize("data", EVENTS)
async def test_events_that_make_no_sense_are_an_error_of_ours(data: bytes) -> None:
    async with answering(saying(event(data))) as client:
        with pytest.raises(LowtideError):
            await client.execute(Run(command="x"), seconds=60, on_output=lambda text: None)


@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.parametrize("begin", [b"fffffffffff\r\n", b""])
async def test_an_answer_without_end_is_given_up(
    listening: bool, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 1 << 20)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + begin)
        while True:
            writer.write(b"a" * 65_536 if begin else b"10000\r\n" + b"a" * 65_536 + b"\r\n")
            await writer.drain()

    async with answering(flood) as client:
        with pytest.raises(SandboxError, match="more than 1 MiB"):
            on_output = (lambda text: None) if listening else None
            await client.execute(Run(command="x"), seconds=60, on_output=on_output)


@pytest.mark.parametrize("status", [b"200 OK", b"500 X"])
async def test_an_answer_that_would_fill_memory_when_parsed_is_refused(status: bytes) -> None:
    body = b"[" + b"[]," * (12 << 20) + b"[]]"  # 36 MiB, of which a parser makes 940
    answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
    async with answering(saying(answer)) as client:
        tracemalloc.start()
        try:
            with pytest.raises(SandboxError) as refused:
                await client.execute(Run(command="x"), seconds=60)
            assert tracemalloc.get_traced_memory()[1] < 256 << 20
        finally:
            tracemalloc.stop()
    assert ("1024 MiB of memory" in str(refused.value)) == (status == b"200 OK")


async def test_a_download_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_DOWNLOAD_BYTES", 1 << 20)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"a" * 65_536 + b"\r\n")
            await writer.drain()

    async with answering(flood) as client, asyncio.timeout(60):
        with pytest.raises(SandboxError, match="more than"):
            await client.download("/f", tmp_path / "f")
    assert (tmp_path / "f").stat().st_size <= 1 << 20


async def test_a_refusal_in_the_middle_of_an_upload_is_heard(tmp_path: Path) -> None:
    refusal = b'{"detail": "no room"}'

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 X\r\nContent-Length: %d\r\n\r\n" % len(refusal) + refusal)
        await writer.drain()
        while await reader.read(1 << 16):
            pass

    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # nobody could send all of it
    async with answering(refuse) as client, asyncio.timeout(60):
        with pytest.raises(ValidationError, match="no room"):
            await client.upload(large, "/tmp", recursive=False)


async def test_a_file_that_becomes_shorter_is_no_upload_and_no_wait(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (32 << 20))

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with path.open("r+b") as file:
            file.truncate(10)
        while await reader.read(1 << 16):
            pass

    async with answering(take) as client, asyncio.timeout(60):
        with pytest.raises(SandboxFileError, match="shorter"):
            await client.upload(path, "/tmp", recursive=False)


class Command:
    """A command in a hostile sandbox, as a provider hands it over."""

    def __init__(self, said: AsyncIterator[tuple[int, bytes]]) -> None:
        self._said = said
        self.closed = False

    def output(self) -> AsyncIterator[tuple[int, bytes]]:
        return self._said

    async def write_stdin(self, data: bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    async def terminate(self, grace_seconds: float) -> None: ...

    async def aclose(self) -> None:
        self.closed = True


async def test_a_relay_that_says_too_much_is_given_up() -> None:
    async def flood() -> AsyncIterator[tuple[int, bytes]]:
        yield STDOUT, b"0 cmVhZHk=\n"
        for _ in range(100):
            yield STDERR, b"e" * 10_000
        while True:
            yield STDOUT, b"a" * 65_536
            await asyncio.sleep(0)

    command = Command(flood())
    relay = Relay(command)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await asyncio.wait([relay._task])
    assert len(relay._said) <= relay_module._SAID_BYTES
    with pytest.raises(SandboxError):
        await relay.open()
    await relay.aclose()
    assert command.closed


async def test_a_relay_takes_no_more_than_its_readers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_LIMIT", 1 << 16)
    sent = 0

    async def flood() -> AsyncIterator[tuple[int, bytes]]:
        nonlocal sent
        yield STDOUT, b"0 cmVhZHk=\n"
        for _ in range(1000):
            sent += 3000
            yield STDOUT, b"1 " + b"YWFh" * 1000 + b"\n"
            await asyncio.sleep(0)
        yield STDOUT, b"1 \n1 YWFh\n"  # bytes behind its own end

    command = Command(flood())
    relay = Relay(command)  # type: ignore[arg-type]
    reader, writer = await relay.open()
    async with asyncio.timeout(60):
        while relay._room.is_set():
            await asyncio.sleep(0)
        assert sent < 1 << 18
        assert len(await reader.read(-1)) == 3_000_000
    writer.close()
    await relay.aclose()
    assert command.closed
