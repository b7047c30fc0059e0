"""Requests into a sandbox's ports, whatever the program behind the port answers: never an internal error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from lowtide.emulators.ports import PortClosed, PortProxy
from lowtide.emulators.web import HttpServer

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_NOT_HTTP = {
    "garbage": b"\x00\xff garbage\r\n\r\n",
    "a status that is none": b"HTTP/1.1 99999 X\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nx",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "a header that is none": b"HTTP/1.1 200 OK\r\nX-\xff: a\r\nContent-Length: 2\r\n\r\nok",
    "another protocol": b"HTTP/1.1 101 Yes\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "nothing": b"",
}
_WEBSOCKET = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


def _refused(request: web.Request, status: int, message: str) -> web.Response:
    return web.json_response({"refused": message}, status=status)


class Passed:
    """A proxy in front of a program that answers whatever it is told to."""

    def __init__(self) -> None:
        self.answer, self.heard, self.open = _OK, b"", 0

    async def program(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            self.heard = await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def ask(self, head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head + b"\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        finally:
            writer.close()

    port = 0


@pytest.fixture
async def passed() -> AsyncIterator[Passed]:
    found, proxy = Passed(), PortProxy()
    program = await asyncio.start_server(found.program, "127.0.0.1", 0, limit=1 << 20)
    base = f"http://127.0.0.1:{program.sockets[0].getsockname()[1]}"

    async def forward(request: web.Request) -> web.StreamResponse:
        try:
            return await proxy.forward(request, base)
        except PortClosed:
            return _refused(request, 502, "closed")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    http = HttpServer(app, refusal=_refused, passed_on=lambda request: True)
    await http.start()
    server = await asyncio.get_running_loop().create_server(http.connection, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        program.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await http.aclose()
        await proxy.aclose()


@pytest.mark.parametrize("kind", _NOT_HTTP)
async def test_what_is_no_answer_is_a_bad_gateway(passed: Passed, kind: str) -> None:
    passed.answer = _NOT_HTTP[kind]
    for more in (b"", b"\r\n" + _WEBSOCKET + _KEY.rstrip()):
        assert (await passed.ask(b"GET / HTTP/1.1" + more)).startswith(b"HTTP/1.1 502 "), more


async def test_bytes_on_the_head_that_no_head_may_hold_are_left_out(passed: Passed) -> None:
    passed.answer = b"HTTP/1.1 200 \x01\xff\r\nX-A: \xff\xfeb\tc\r\nContent-Length: 2\r\n\r\nok"
    answer = await passed.ask(b"GET / HTTP/1.1")
    assert b"X-A: ??b\tc\r\n" in answer
    assert answer.endswith(b"ok")


async def test_an_address_with_its_server_goes_to_the_program_and_nowhere_else(passed: Passed) -> None:
    answer = await passed.ask(b"GET http://192.0.2.1:1/there?x=%2F HTTP/1.1")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert passed.heard.startswith(b"GET /there?x=%2F HTTP/1.1\r\n")
    assert b"aiohttp" not in passed.heard, "a header that the caller did not send"


async def test_half_a_handshake_is_refused_and_leaves_no_connection(passed: Passed) -> None:
    for more in (b"Upgrade: websocket", _WEBSOCKET.rstrip()):
        assert (await passed.ask(b"GET / HTTP/1.1\r\n" + more)).startswith(b"HTTP/1.1 400 ")
    assert passed.heard == b""


@pytest.mark.parametrize(
    "head",
    [
        b"GET /%b HTTP/1.1" % (b"a" * 300_000),
        b"GET / HTTP/1.1\r\nX: %b" % (b"a" * 300_000),
        b"G\xff / HTTP/9.9",
    ],
    ids=["line", "header", "garbage"],
)
async def test_what_is_no_request_is_refused_in_the_services_shape(passed: Passed, head: bytes) -> None:
    answer = await passed.ask(head)
    assert b" 400 " in answer[:20]
    assert b'{"refused": ' in answer


async def test_a_long_address_is_taken(passed: Passed) -> None:
    assert (await passed.ask(b"GET /%b HTTP/1.1" % (b"a" * 100_000))).endswith(b"ok")


async def test_whoever_connects_and_says_nothing_is_let_go() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(1.0)  # longer than a head may take, which is for heads only
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", slow)
    http = HttpServer(app, refusal=_refused, head_seconds=0.3)
    await http.start()
    server = await asyncio.get_running_loop().create_server(http.connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(20):
            for said in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                assert await reader.read() == b""
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"ok")
            writer.close()
    finally:
        server.close()
        await http.aclose()
