"""The server: its tools over standard input and output, for the one client that started it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer

from lowtide._version import __version__
from lowtide.integrations.mcp.connection import Bounds, Connection
from lowtide.integrations.mcp.tools import add_tools

INSTRUCTIONS = """\
Runs commands and code in sandboxes that are isolated from this machine. The first call makes a sandbox; it is used by
all calls that name no other and keeps files between them. Everything ends with this connection. Long output is cut in
the middle, and the answer says how much is missing: write it to a file and read parts of it."""


_LEAVE_SECONDS = 5.0
"""For the last answers to be read, once everything has ended."""


def make_server(
    connection_of: Callable[[Context[Any, Any]], Connection],
    lifespan: Callable[[MCPServer[None]], contextlib.AbstractAsyncContextManager[None]] | None = None,
) -> MCPServer[None]:
    """The server with its nine tools, over any transport."""
    server: MCPServer[None] = MCPServer(
        "lowtide",
        title="lowtide sandboxes",
        instructions=INSTRUCTIONS,
        version=__version__,
        lifespan=lifespan,
        log_level="WARNING",
        subscriptions=False,
    )
    add_tools(server, connection_of)
    return server


def one_connection(
    defaults: Mapping[str, Any], bounds: Bounds, when_over: Callable[[], None] | None = None
) -> MCPServer[None]:
    """A server of one client: everything ends when it has gone, and then `when_over` is called."""
    held: list[Connection] = []

    @contextlib.asynccontextmanager
    async def life(_: MCPServer[None]) -> AsyncIterator[None]:
        held[:] = [Connection(defaults, bounds)]
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await held[0].close()
            if when_over is not None:
                when_over()

    return make_server(lambda _: held[0], life)


def serve_stdio(defaults: Mapping[str, Any], bounds: Bounds) -> None:
    """Until standard input ends: then the client has gone, killed or not."""
    one_connection(defaults, bounds, _leave_soon).run("stdio")


def _leave_soon() -> None:
    """A client that has closed our input and reads nothing would hold us in a write for as long as it lives."""
    leaving = threading.Timer(_LEAVE_SECONDS, os._exit, (0,))
    leaving.daemon = True
    leaving.start()
