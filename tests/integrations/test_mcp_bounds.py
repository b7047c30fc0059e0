"""What clients of `lowtide mcp` can use up, and how soon what they had is over when they have gone."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

mcp = pytest.importorskip("mcp")

from lowtide import Sandbox  # noqa: E402
from lowtide.integrations.mcp import http  # noqa: E402
from lowtide.integrations.mcp.connection import Bounds  # noqa: E402
from tests.integrations.test_mcp import FACTOR, PROMISED_SECONDS, call, connected, refused  # noqa: E402

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
