"""The end of a sandbox: asked for, and confirmed.

The two requests go over the SDK's own connections, but not through its HTTP client, which is made anew for
every call: both are on the way of everybody who waits for an end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.providers import hosted
from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.errors import SERVICE

KILL_SECONDS = 20.0
LOOK_SECONDS = 30.0
CONFIRM_SECONDS = 10.0
"""How long a sandbox may still be there after its end was acknowledged."""
_GONE = 404


@dataclass(frozen=True, slots=True)
class _Answer:
    """As much of an answer as the SDK's own reading of errors needs."""

    status_code: int
    content: bytes
    headers: Any


class Destroy:
    """One account's ends."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._headers: dict[str, str] | None = None
        self._base = ""
        self._pool: dict[str, Any] = {}

    async def run(self, sandbox_id: str) -> bool:
        """True: ended now, confirmed. False: it was already gone."""

        async def ask() -> hosted.End:
            work = self._found("DELETE", sandbox_id)
            ended = await SERVICE.call(KILL_SECONDS, work, "kill", sandbox_id)
            return hosted.End.ACCEPTED if ended else hosted.End.MISSING

        async def look() -> hosted.End:
            there = await SERVICE.call(LOOK_SECONDS, self._found("GET", sandbox_id), "get", sandbox_id)
            return hosted.End.THERE if there else hosted.End.GONE

        return await hosted.delete(
            ask, look, service=SERVICE, sandbox_id=sandbox_id, confirm_seconds=CONFIRM_SECONDS
        )

    async def _found(self, method: str, sandbox_id: str) -> bool:
        from e2b.api import handle_api_exception

        res = await self._send(method, f"/sandboxes/{sandbox_id}")  # `res`: see `errors.retry_after`
        if res.status_code == _GONE:
            if not hosted.is_own(res.content):
                raise SERVICE.elsewhere(sandbox_id)
            return False
        if res.status_code >= 300:
            raise handle_api_exception(res)
        return True

    async def _send(self, method: str, path: str) -> _Answer:
        from e2b.api.client_async import get_pyqwest_transport
        from pyqwest import Client

        headers = self._headers or self._prepare()
        # From the SDK's table each time: it has new connections after a fork, and after the last `aclose`.
        client = Client(get_pyqwest_transport(**self._pool))
        answer = await client.execute(method, self._base + path, headers)
        return _Answer(answer.status, bytes(answer.content), answer.headers)

    def _prepare(self) -> dict[str, str]:
        from e2b.api import proxy_to_config
        from e2b.api.metadata import default_headers
        from e2b.connection_config import ConnectionConfig

        config = ConnectionConfig(**self._access.parameters())
        self._base = config.api_url.rstrip("/")
        self._pool = {"proxy": proxy_to_config(config.proxy)}
        if hasattr(config, "http_version"):
            # Without the SDK's own retries of connecting, which cost more than the request: an end that
            # could not be asked for is asked for again by whoever wants it.
            self._pool |= {"http_version": config.http_version, "retry_connect": False}
        self._headers = {**default_headers, **(config.headers or {}), "X-API-KEY": self._access.api_key}
        return self._headers
