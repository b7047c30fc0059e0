"""Deleting a sandbox: asked by id and confirmed by id, below the SDK's models.

403 means that the key may not delete: then the sandbox is stopped, which ends one that is set to be deleted
when it stops, and if it is still there after that, the error says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.daytona.errors import SERVICE
from lowtide.providers.hosted import End

if TYPE_CHECKING:
    from daytona import AsyncDaytona

log = logging.getLogger("lowtide.daytona")

CALL_SECONDS = 20.0
_STOPPED_LOOKS = 20
"""One that is deleted when it stops takes a moment."""


class Refusal(Exception):
    """An answer that is an error, with its status where the SDK's own have it."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


async def delete(sdk: AsyncDaytona, sandbox_id: str) -> bool:
    """True: deleted now, confirmed. False: it was already gone."""
    api: Any = sdk._sandbox_api

    async def ask() -> End:
        asking = api.delete_sandbox_without_preload_content(sandbox_id, _request_timeout=CALL_SECONDS)
        said = await _said(asking, "delete", sandbox_id)
        if isinstance(said, str):
            return {"destroyed": End.GONE, "destroying": End.ENDING}.get(said, End.ACCEPTED)
        if said.status in (404, 410):
            return End.MISSING
        if said.status in (403, 409):
            return End.REFUSED if said.status == 403 else End.BUSY
        raise SERVICE.translated(said, sandbox_id) or said from said

    async def look() -> End:
        asking = api.get_sandbox_without_preload_content(sandbox_id, _request_timeout=CALL_SECONDS)
        said = await _said(asking, "get", sandbox_id)
        if isinstance(said, str):
            return {"destroyed": End.GONE, "destroying": End.ENDING}.get(said, End.THERE)
        if said.status in (404, 410):
            return End.GONE
        raise SERVICE.translated(said, sandbox_id) or said from said

    async def stop() -> End:
        """Not allowed to delete: at least it runs no longer, and the lease stays in the ledger."""
        became = "it could not be stopped either"
        try:
            stopping = api.stop_sandbox(sandbox_id, force=True, _request_timeout=CALL_SECONDS)
            await SERVICE.call(CALL_SECONDS + 1.0, stopping, "stop", sandbox_id)
            became = "it was stopped instead"
            for _ in range(_STOPPED_LOOKS):
                if await look() is End.GONE:
                    return End.GONE
                await asyncio.sleep(0.1)
        except errors.SandboxNotFoundError:
            return End.GONE
        except errors.LowtideError as error:
            log.warning("sandbox %s: not allowed to delete it, and stopping it failed: %s", sandbox_id, error)
        raise errors.AuthenticationError(
            f"this key may not delete sandbox {sandbox_id}; {became}. Delete it with a key that may",
            provider="daytona",
            sandbox_id=sandbox_id,
        )

    return await hosted.delete(ask, look, service=SERVICE, sandbox_id=sandbox_id, instead=stop)


async def _said(asking: Any, what: str, sandbox_id: str) -> str | Refusal:
    """Daytona's word for what the sandbox is now, or its refusal. Raises LowtideError when there is no answer."""

    async def answer() -> str | Refusal:
        response = await asking
        body = await response.read()
        try:
            said = json.loads(body) if body else {}
        except ValueError:
            said = {}
        if not isinstance(said, dict):
            said = {}
        if response.status >= 400:
            return Refusal(response.status, str(said.get("message") or response.reason), response.headers)
        return str(said.get("state") or "unknown")

    return await SERVICE.call(CALL_SECONDS + 1.0, answer(), what, sandbox_id)
