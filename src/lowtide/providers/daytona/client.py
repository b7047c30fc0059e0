"""The SDK's client: imported and made on first use, one for each event loop, closed to the last descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lowtide.providers.daytona.access import Access

if TYPE_CHECKING:
    from daytona import AsyncDaytona

T = TypeVar("T")

_CLOSING_SECONDS = 5.0


class Client:
    """Holds the SDK's client. It belongs to the loop it was first used in; another loop, as in a forked
    child, gets its own."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._sdk: AsyncDaytona | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._making: asyncio.Task[AsyncDaytona] | None = None

    async def sdk(self) -> AsyncDaytona:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._sdk, self._making = loop, None, None
        if self._sdk is not None:
            return self._sdk
        if self._making is None:
            self._making = loop.create_task(_apart(lambda: _make(self._access)))
        try:
            self._sdk = await asyncio.shield(self._making)
            _spare_lookups(self._sdk)
        finally:
            if self._making is not None and self._making.done():
                self._making = None
        return self._sdk

    @property
    def unused(self) -> bool:
        """Whether nothing has been asked of the service yet."""
        return self._sdk is None

    async def aclose(self) -> None:
        making, sdk = self._making, self._sdk
        mine = self._loop is asyncio.get_running_loop()
        self._making = self._sdk = self._loop = None
        if not mine:
            return
        if making is not None:
            sdk = await making
        if sdk is None:
            return
        session = getattr(getattr(sdk, "_shared_session", None), "session", None)
        gone = _transports(session)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSING_SECONDS):
                await sdk.close()  # type: ignore[no-untyped-call]
        # A closed session's sockets are closed by the loop a little later; after us there may be no later.
        for _ in range(50):
            if all(transport.is_closing() and _is_closed(transport) for transport in gone):
                break
            await asyncio.sleep(0.01)


def _make(access: Access) -> AsyncDaytona:
    """The expensive part: the import alone takes more than a second."""
    from daytona import AsyncDaytona, DaytonaConfig

    settings: dict[str, Any] = {
        "api_key": access.api_key,
        "jwt_token": access.jwt_token,
        "organization_id": access.organization_id,
        "api_url": access.api_url,
        "target": access.target,
        # No Socket.IO connection beside: states are asked for by id, and an event is no proof.
        "use_deprecated_polling": True,
    }
    said = {name: value for name, value in settings.items() if value is not None}
    # A command that is followed holds a connection: with a limit, many of them would keep a delete waiting.
    said["connection_pool_maxsize"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return AsyncDaytona(DaytonaConfig(**said))


def _spare_lookups(sdk: AsyncDaytona) -> None:
    """aiohttp looks for a proxy and for a netrc before every request, in a thread each. Where there is
    neither, it need not."""
    shared: Any = getattr(sdk, "_shared_session", None)
    client = getattr(getattr(sdk, "_api_client", None), "rest_client", None)
    if _ways_around() or client is None or not hasattr(shared, "_ensure_session"):
        return
    shared._ensure_session(client)  # else it is made with the first request
    if getattr(shared.session, "_trust_env", None) is True:
        shared.session._trust_env = False


def _ways_around() -> bool:
    if os.environ.get("NETRC") or any(kind != "no" for kind in urllib.request.getproxies()):
        return True
    try:
        return any((Path.home() / name).exists() for name in (".netrc", "_netrc"))
    except (OSError, RuntimeError):
        return True


async def _apart(work: Callable[[], T]) -> T:
    """Run something slow in a thread that ends with it, so that the loop goes on and no thread is left."""
    if "daytona" in sys.modules and "daytona._async.daytona" in sys.modules:
        return work()
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, answer, None, error)
        else:
            loop.call_soon_threadsafe(_settle, answer, result, None)

    try:
        threading.Thread(target=run, name="lowtide-daytona-import", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        return work()
    return await answer


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _transports(session: Any) -> list[asyncio.Transport]:
    """The connections a session holds open. aiohttp has no public way to wait for their end."""
    found = []
    for held in getattr(getattr(session, "connector", None), "_conns", {}).values():
        for one in held:
            transport = getattr(one[0], "transport", None)
            if transport is not None:
                found.append(transport)
    return found


def _is_closed(transport: asyncio.Transport) -> bool:
    socket = transport.get_extra_info("socket")
    return socket is None or socket.fileno() < 0
