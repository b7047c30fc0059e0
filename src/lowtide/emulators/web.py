"""An aiohttp application as a connection factory, with the checks every emulator's port makes first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from lowtide.emulators.request_check import Malformed, Refusal, check_head, check_origin

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves `app` on whatever connections it is given.

    `refusal` is how its service says no; `passed_on` tells which requests go to a program in a sandbox,
    which decides for itself what a head may hold; `answered` hears of each answer: operation, status, seconds.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        refusal: Refusal,
        passed_on: Callable[[web.Request], bool] = lambda request: False,
        answered: Callable[[str, int, float], None] | None = None,
        allow_remote: bool = False,
    ) -> None:
        app.middlewares.insert(0, _check(refusal, passed_on, allow_remote))
        if answered is not None:
            app.middlewares.insert(0, _tell(answered))
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, shutdown_timeout=0.2, handler_cancellation=True
        )

    async def start(self) -> None:
        await self._runner.setup()

    def connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "start() comes first"
        return server()

    async def aclose(self) -> None:
        await self._runner.cleanup()


def through_proxy(request: web.Request) -> bool:
    """True for what came through the CONNECT proxy: it had to show the proxy's token to get here."""
    return request.transport is not None and request.transport.get_extra_info("ssl_object") is not None


def _tell(answered: Callable[[str, int, float], None]) -> Any:
    @web.middleware
    async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
        started, status = time.monotonic(), 0  # 0: hung up without an answer
        try:
            answer = await handler(request)
            status = answer.status
            return answer
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            answered(f"{request.method} {request.path}", status, time.monotonic() - started)

    return tell


def _check(refusal: Refusal, passed_on: Callable[[web.Request], bool], allow_remote: bool) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not passed_on(request):
                check_head(request)
            if not through_proxy(request) and not allow_remote:
                check_origin(request)
            return await handler(request)
        except Malformed as error:
            return refusal(request, error.status, str(error))
        except web.RequestPayloadError:  # not what its encoding or its length says
            return refusal(request, 400, "the body cannot be read")
        except ConnectionResetError:  # the caller has left
            drop(request)
            raise asyncio.CancelledError from None

    return check


def drop(request: web.Request) -> None:
    """Reset the connection without an answer, as a crashed server or a lost network does.

    A reset, not a close: clients tell the two apart, and only a reset cannot be taken for an end.
    """
    transport = request.transport
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
