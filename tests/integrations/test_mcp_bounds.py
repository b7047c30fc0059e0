"""What clients of `lowtide mcp` can use up, and how soon what they had is over when they have gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp")
httpx2 = pytest.importorskip("httpx2")

from mcp.client.streamable_http import streamable_http_client  # noqa: E402

from lowtide import Sandbox  # noqa: E402
from lowtide.integrations.mcp import http  # noqa: E402
from lowtide.integrations.mcp.connection import Bounds  # noqa: E402
from lowtide.providers.registry import provider as connected_provider  # noqa: E402
from tests.integrations.test_mcp import (  # noqa: E402
    FACTOR,
    PROMISED_SECONDS,
    call,
    connected,
    http_server,
    refused,
)

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    },
}


async def test_only_so_many_ports_of_a_sandbox_have_an_address() -> None:
    """Each is a descriptor of the server's: with a thousand of them it could neither run a command nor take a client."""
    async with connected(ports=2) as client:
        first = await call(client, "port_url", port=8001)
        await call(client, "port_url", port=8002)
        assert await call(client, "port_url", port=8001) == first
        assert "2 ports of this sandbox have an address" in await refused(client, "port_url", port=8003)
        await call(client, "sandbox_end")
        await call(client, "port_url", port=8003)


async def test_what_takes_no_notice_of_its_end_does_not_outlive_the_client() -> None:
    async with connected() as client:
        stubborn = "trap '' TERM; sleep 1000 >/dev/null 2>&1 & true"
        made = await call(client, "run_command", command=stubborn)
        left = time.monotonic()
    assert time.monotonic() - left < PROMISED_SECONDS * FACTOR
    assert made["sandbox"] not in [box.sandbox_id for box in await Sandbox.list(tags=["mcp-test"])]


async def test_over_http_a_client_that_has_gone_leaves_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_SESSIONS", 1)
    monkeypatch.setattr(http, "RECONNECT_SECONDS", 0.1)
    clients = http.Clients({"provider": "local"}, Bounds(), token="t", idle_seconds=1000)
    app: Any = clients._app
    async with app.router.lifespan_context(app):
        status, session = await asked(clients, "POST")
        assert (status, await asked(clients, "POST")) == (200, (503, ""))
        await asked(clients, "GET", session)  # an event stream that breaks off
        deadline = time.monotonic() + 10
        while (await asked(clients, "POST"))[0] != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_over_http_silent_connections_leave_the_clients_and_their_sandboxes_alone() -> None:
    home = Path(os.environ["LOWTIDE_HOME"]) / f"mcp-{os.urandom(4).hex()}"
    home.mkdir(mode=0o700)
    with http_server(home) as (server, url, token):
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (256, 256))
        port = int(url.rpartition(":")[2].partition("/")[0])
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            contextlib.AsyncExitStack() as silent,
            httpx2.AsyncClient(headers=headers, timeout=60) as first,
            mcp.Client(streamable_http_client(url, http_client=first)) as client,
        ):
            made = await call(client, "run_command", command="echo kept > /tmp/file")
            for _ in range(300):
                connection = silent.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                with contextlib.suppress(OSError):  # it was closed already
                    connection.sendall(b"POST /mcp HTTP/1.1\r\nAuth")
            ran = await call(client, "run_command", command="cat /tmp/file")
            assert (ran["stdout"], ran["sandbox"]) == ("kept\n", made["sandbox"])
            async with (
                httpx2.AsyncClient(headers=headers, timeout=60) as second,
                mcp.Client(streamable_http_client(url, http_client=second)) as other,
            ):
                await call(other, "run_command", command="true")
            assert len(os.listdir(f"/proc/{server.pid}/fd")) < 200
        assert server.poll() is None


@pytest.mark.parametrize("held", ["stream", "head", "body"])
async def test_over_http_a_client_with_the_token_leaves_descriptors_for_the_others(held: str) -> None:
    """One that opens connections without an end: event streams, or requests that it never finishes."""
    home = Path(os.environ["LOWTIDE_HOME"]) / f"mcp-{os.urandom(4).hex()}"
    home.mkdir(mode=0o700)
    with http_server(home) as (server, url, token):
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (256, 256))
        port = int(url.rpartition(":")[2].partition("/")[0])
        headers = {"Authorization": f"Bearer {token}"}
        head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
        sent = {
            "stream": head.replace("POST", "GET") + "Accept: text/event-stream\r\n\r\n",
            "head": head + "Content-Length: 2\r\n\r\n{}" + head,
            "body": head + "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        }[held]
        async with (
            contextlib.AsyncExitStack() as open_ones,
            httpx2.AsyncClient(headers=headers, timeout=60) as first,
            mcp.Client(streamable_http_client(url, http_client=first)) as client,
        ):
            made = await call(client, "run_command", command="echo kept > /tmp/file")
            for _ in range(300):
                connection = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                with contextlib.suppress(OSError):  # it was closed already
                    connection.sendall(sent.encode())
            ran = await call(client, "run_command", command="cat /tmp/file")
            assert (ran["stdout"], ran["sandbox"]) == ("kept\n", made["sandbox"])
            assert len(os.listdir(f"/proc/{server.pid}/fd")) < 240
        assert server.poll() is None


async def test_over_http_a_connection_without_the_token_has_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_HEAD_SECONDS", 0.2)
    connections = http.OpenConnections()
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=theirs)
    connections.add("one", transport)
    reader, writer = await asyncio.open_connection(sock=ours)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


@pytest.fixture
def registry() -> Iterator[tuple[str, list[str]]]:
    """The address of something that a client would have the server ask for an image, and what it was asked."""
    asked_for: list[str] = []

    class Asked(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_for.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", asked_for
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_client_cannot_have_an_image_fetched_unless_that_is_allowed(
    registry: tuple[str, list[str]],
) -> None:
    address, asked_for = registry
    async with connected() as client:
        said = await refused(client, "sandbox_create", image=f"{address}/admin/delete:latest")
        assert "--allow-image" in said
    assert asked_for == []
    async with connected(images=(f"{address}/*",)) as client:
        assert "--allow-image" not in await refused(client, "sandbox_create", image=f"{address}/tools/one:1")
        assert "--allow-image" in await refused(client, "sandbox_create", image="other.example/tools/one:1")
    assert asked_for


async def test_a_client_can_choose_an_image_of_the_store(tmp_path: Path) -> None:
    (root := tmp_path / "root").mkdir()
    (root / "tmp").mkdir()
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(root, arcname=".")
    name = f"mcp-bounds-{os.getpid()}:1"
    provider = connected_provider("local")
    store: Any = provider
    store.images.import_file(name, tmp_path / "image.tar")
    try:
        async with connected() as client:
            made = await call(client, "sandbox_create", image=name)
            await call(client, "sandbox_end", sandbox=made["sandbox"])
    finally:
        store.images.remove(name)


async def asked(clients: http.Clients, method: str, session: str = "") -> tuple[int, str]:
    """The status of one request whose client goes a moment later, and the session it was given."""
    starts: list[Any] = []
    body = json.dumps(INITIALIZE).encode() if method == "POST" else b""
    coming = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if coming:
            return coming.pop()
        await asyncio.sleep(0.2)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        starts.extend([message] if message["type"] == "http.response.start" else [])

    said = {
        "authorization": "Bearer t",
        "host": "127.0.0.1:1",
        "accept": "application/json, text/event-stream",
    }
    said |= {"content-type": "application/json"} | ({"mcp-session-id": session} if session else {})
    headers = [(name.encode(), value.encode()) for name, value in said.items()]
    scope = {"type": "http", "path": "/mcp", "method": method, "query_string": b"", "headers": headers}
    await clients(scope, receive, send)
    return starts[0]["status"], dict(starts[0]["headers"]).get(http.SESSION_HEADER, b"").decode()
