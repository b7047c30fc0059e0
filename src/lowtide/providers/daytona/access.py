"""Which Daytona account, at which address, and the SDK's client for it: made on first use, closed to the last descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.providers import hosted

if TYPE_CHECKING:
    from aiohttp import ClientSession, TraceConfig
    from daytona import AsyncDaytona

PROVIDER = "daytona"
KEY, JWT, ORGANIZATION = "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN", "DAYTONA_ORGANIZATION_ID"
API_URL, TARGET, SNAPSHOT = "DAYTONA_API_URL", "DAYTONA_TARGET", "LOWTIDE_DAYTONA_SNAPSHOT"
DEFAULT_URL = "https://app.daytona.io/api"

_OPTIONS = {
    "api_key": KEY,
    "jwt_token": JWT,
    "organization_id": ORGANIZATION,
    "api_url": API_URL,
    "target": TARGET,
    "snapshot": SNAPSHOT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where and who. The key is never shown."""

    api_key: str | None = field(default=None, repr=False)
    jwt_token: str | None = field(default=None, repr=False)
    organization_id: str | None = None
    api_url: str = DEFAULT_URL
    target: str | None = None
    snapshot: str | None = None
    way: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """Raises ValidationError for an unknown option, AuthenticationError without a key."""
        found = hosted.chosen(PROVIDER, _OPTIONS, options, environ)
        if not found["api_key"] and not (found["jwt_token"] and found["organization_id"]):
            raise hosted.needs_key("Daytona", PROVIDER, f"{KEY} (or {JWT}", f"{ORGANIZATION})")
        hosted.needs_sdk(PROVIDER, "Daytona", "daytona")
        if found["api_key"]:
            found["jwt_token"] = None
        found["api_url"] = (found["api_url"] or DEFAULT_URL).rstrip("/")
        return cls(way=hosted.way_of(environ), **found)  # type: ignore[arg-type]

    @property
    def account(self) -> str:
        """A token changes, its organisation does not. A key belongs to one, and is not asked for which: what else
        the environment says of an organisation proves nothing about it."""
        who = self.api_key or f"organization {self.organization_id}"
        return hosted.account(PROVIDER, self.api_url, who)

    def credentials(self) -> dict[str, str]:
        return hosted.credentials_of(self, _OPTIONS)


_CLOSING_SECONDS = 5.0


class Connection:
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
            self._making = loop.create_task(self._make(loop))
        try:
            self._sdk = await asyncio.shield(self._making)
            _prepare_session(self._sdk)
        finally:
            if self._making is not None and self._making.done():
                self._making = None
        return self._sdk

    async def _make(self, loop: asyncio.AbstractEventLoop) -> AsyncDaytona:
        """The import alone takes more than a second: the loop goes on meanwhile."""
        if "daytona._async.daytona" not in sys.modules:
            with contextlib.suppress(
                RuntimeError
            ):  # the interpreter is shutting down and starts no more threads
                await loop.run_in_executor(None, importlib.import_module, "daytona._async.daytona")
        return _made(self._access)

    async def session(self) -> tuple[ClientSession, dict[str, str]]:
        """The SDK's own connections, and what it says of itself with each request: for a WebSocket."""
        sdk: Any = await self.sdk()
        sdk._shared_session._ensure_session(sdk._api_client.rest_client)
        return sdk._shared_session.session, dict(sdk._api_client.default_headers)

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


def _made(access: Access) -> AsyncDaytona:
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


def _prepare_session(sdk: AsyncDaytona) -> None:
    """Set up the SDK's HTTP session: it follows no redirects, and looks for no proxy or netrc where there is none.

    aiohttp looks for both before every request, in a thread each.
    """
    shared: Any = getattr(sdk, "_shared_session", None)
    client = getattr(getattr(sdk, "_api_client", None), "rest_client", None)
    if client is None or not hasattr(shared, "_ensure_session"):
        return
    shared._ensure_session(client)  # else it is made with the first request
    if isinstance(getattr(shared.session, "_trace_configs", None), list):
        shared.session._trace_configs.append(_no_redirects())
    if not _ways_around() and getattr(shared.session, "_trust_env", None) is True:
        shared.session._trust_env = False


def _no_redirects() -> TraceConfig:
    """Daytona does not redirect. Whoever does would be sent a create with everything in it, the key too."""
    from aiohttp import TraceConfig

    async def refuse(session: Any, context: Any, redirect: Any) -> None:
        redirect.response.close()
        raise ConnectionError("a redirect came in place of an answer, and was not followed")

    trace = TraceConfig()
    trace.on_request_redirect.append(refuse)
    trace.freeze()
    return trace


def _ways_around() -> bool:
    if os.environ.get("NETRC") or any(kind != "no" for kind in urllib.request.getproxies()):
        return True
    try:
        return any((Path.home() / name).exists() for name in (".netrc", "_netrc"))
    except (OSError, RuntimeError):
        return True


def _transports(session: Any) -> list[asyncio.Transport]:
    """The connections a session holds open. aiohttp has no public way to wait for their end."""
    held = getattr(getattr(session, "connector", None), "_conns", {}).values()
    found = [getattr(one[0], "transport", None) for several in held for one in several]
    return [transport for transport in found if transport is not None]


def _is_closed(transport: asyncio.Transport) -> bool:
    socket = transport.get_extra_info("socket")
    return socket is None or socket.fileno() < 0
