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
from aiohttp.web_protocol import RequestHandler

from lowtide.emulators.request_check import Malformed, Refusal, check_head, check_origin

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


HEAD_SECONDS = 60.0
_LONGEST_LINE = 256 << 10  # the services take up to a mebibyte, aiohttp by itself 8 KiB


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
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        app.middlewares.insert(0, _check(refusal, passed_on, allow_remote))
        if answered is not None:
            app.middlewares.insert(0, _tell(answered))
        self._refusal, self._head_seconds = refusal, head_seconds
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            shutdown_timeout=0.2,
            handler_cancellation=True,
            max_line_size=_LONGEST_LINE,
            max_field_size=_LONGEST_LINE,
        )

    async def start(self) -> None:
        await self._runner.setup()

    def connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "start() comes first"
        loop = asyncio.get_running_loop()
        return _Connection(self._refusal, self._head_seconds, server, loop=loop, **server._kwargs)

    async def aclose(self) -> None:
        await self._runner.cleanup()


class _Connection(RequestHandler):
    """Says what aiohttp itself says of a request, that it is no HTTP or was not answered, in the service's shape.

    Whoever connects has a time to send the head of a request: connections that say nothing would keep others out.
    """

    __slots__ = ("_head_seconds", "_refusal", "_silent")

    def __init__(self, refusal: Refusal, head_seconds: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal, self._head_seconds = refusal, head_seconds
        self._silent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._silent = loop.call_later(self._head_seconds, self._end_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._silent is not None:
            self._silent.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        if self._request_count == 0:  # later ones have aiohttp's own time
            self.force_close()

    def handle_error(
        self,
        request: Any,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # writes the log
        reason = "internal error" if status >= 500 else f"the request is no HTTP: {message or status}"[:300]
        answer = self._refusal(request, status, reason)
        answer.force_close()
        return answer


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
        except web.HTTPException as error:  # no such address, no such method, too large
            if error.status < 400:
                raise
            answer = refusal(request, error.status, error.reason)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
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
