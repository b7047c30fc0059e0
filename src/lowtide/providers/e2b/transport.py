"""The SDK's HTTP connections: none left after the last provider, usable after a fork, at rest at exit.

The SDK sends with pyqwest and keeps its connections in the module, for as long as the process lives.

* They are shared by everybody in the process who uses the SDK, so they are not closed from here: they are
  taken out of the SDK's tables, and their sockets close when nobody holds them any more.
* pyqwest's threads belong to the process that started them. In a forked child every request would wait for
  them for ever, so that one gets a transport of the same shape that stands on httpx, which the SDK brings along.
* They hand each answer back to Python. One that is still at it when the interpreter ends is stopped in the
  middle of its Rust frames, and that aborts the process with a signal (about one exit in sixty). So calls
  still on their way are given up, and the threads get a moment. Registered when this is imported: that is
  before the first create arms the exit hook that ends sandboxes, and exit hooks run in the opposite order.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from lowtide import engine, threads

if TYPE_CHECKING:
    from pyqwest import Request, Response

TABLES = ("_transports", "_pools", "_httpx_transports")
"""Where some version of the SDK keeps its connections."""
_EXIT_SECONDS = 1.0
_REST_SECONDS = 0.05

_lock = threads.Lock()
_users: set[int] = set()
_calls: set[asyncio.Future[Any]] = set()
_forked = False


def join(user: object) -> None:
    """Somebody uses the SDK from now on, in this process."""
    global _forked
    with _lock:
        _users.add(id(user))
    if _forked:
        from e2b.api import client_async

        vars(client_async)["HTTPTransport"] = PlainTransport
        forget()
        _forked = False


def leave(user: object) -> None:
    """Nobody is left after the last one: then the SDK starts with new connections, and the old ones close."""
    with _lock:
        if id(user) not in _users:
            return
        _users.discard(id(user))
        if _users:
            return
    forget()


def forget() -> None:
    from e2b.api import client_async

    lock: Any = getattr(client_async, "_transport_lock", _lock)
    with lock:
        for name in TABLES:
            table = getattr(client_async, name, None)
            if isinstance(table, dict):
                table.clear()
    gc.collect()  # the SDK's clients are cycles, and hold on to their pool until somebody looks


def track(call: asyncio.Future[Any]) -> None:
    """Give this one up at exit, if it is still on its way."""
    _calls.add(call)
    call.add_done_callback(_calls.discard)


class PlainTransport:
    """`pyqwest.HTTPTransport`, as far as the SDK uses it."""

    def __init__(self, *, proxy: Any = None, read_timeout: float | None = None, **_: Any) -> None:
        import httpx

        self._client = httpx.AsyncClient(
            proxy=None if proxy is None else str(proxy.url),
            timeout=httpx.Timeout(None, connect=30.0, read=read_timeout),
            limits=httpx.Limits(max_connections=200, max_keepalive_connections=20),
            follow_redirects=False,
        )

    async def execute(self, request: Request) -> Response:
        import pyqwest

        content = request.content
        asked = self._client.build_request(
            request.method,
            request.url,
            headers=list(request.headers.items()),
            content=content if isinstance(content, bytes) else (bytes(chunk) async for chunk in content),
        )
        for name in ("accept", "accept-encoding", "user-agent"):  # httpx adds its own
            if name not in request.headers:
                asked.headers.pop(name, None)
        with _told():
            answer = await self._client.send(asked, stream=True)
        headers = pyqwest.Headers(answer.headers.multi_items())
        return pyqwest.Response(status=answer.status_code, headers=headers, content=_body(answer))

    async def aclose(self) -> None:
        await self._client.aclose()


async def _body(answer: Any) -> AsyncIterator[bytes]:
    try:
        with _told():
            async for chunk in answer.aiter_raw():
                yield chunk
    finally:
        with contextlib.suppress(Exception):
            await answer.aclose()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """httpx's errors, as pyqwest has them."""
    import httpx
    import pyqwest

    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ConnectionError(str(error)) from error
    except httpx.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except httpx.TransportError as error:
        raise pyqwest.ReadError(str(error)) from error


def _after_fork() -> None:
    global _lock, _forked
    _lock = threads.Lock()
    _users.clear()
    _calls.clear()
    _forked = "e2b.api.client_async" in sys.modules


def _at_exit() -> None:
    if "pyqwest" not in sys.modules or not engine.started():
        return
    running = engine.engine()
    with contextlib.suppress(Exception):  # on the way out, and the sandboxes are ended by now
        running.run(_give_up(running.loop), timeout=_EXIT_SECONDS * 2)
    time.sleep(_REST_SECONDS)


async def _give_up(loop: asyncio.AbstractEventLoop) -> None:
    left = [call for call in _calls if not call.done() and call.get_loop() is loop]
    for call in left:
        call.cancel()
    if left:
        await asyncio.wait(left, timeout=_EXIT_SECONDS)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
