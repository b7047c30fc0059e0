"""Deleting a sandbox: asked by id and confirmed by id, below the SDK's models.

403 means that the key may not delete: then the sandbox is stopped, which ends one that is set to be deleted
when it stops, and if it is still there after that, the error says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowtide import errors, logger
from lowtide.providers import hosted
from lowtide.providers.daytona.errors import SERVICE
from lowtide.providers.hosted import End

if TYPE_CHECKING:
    from daytona import AsyncDaytona

log = logger.get("lowtide.daytona")

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
        told = {404: End.MISSING, 410: End.MISSING, 403: End.REFUSED, 409: End.BUSY}
        return await _said(asking, "delete", sandbox_id, told, End.ACCEPTED)

    async def look() -> End:
        asking = api.get_sandbox_without_preload_content(sandbox_id, _request_timeout=CALL_SECONDS)
        return await _said(asking, "get", sandbox_id, {404: End.GONE, 410: End.GONE}, End.THERE)

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


async def _said(asking: Any, what: str, sandbox_id: str, told: Mapping[int, End], otherwise: End) -> End:
    """What the answer means, by its status and by Daytona's word for the state. Raises LowtideError."""

    async def answer() -> End:
        response = await asking
        body = await response.read()
        if response.status in (404, 410) and not hosted.is_own(body, "sandbox", sandbox_id):
            raise SERVICE.elsewhere(sandbox_id)
        if response.status in told:
            return told[response.status]
        try:
            said = dict(json.loads(body or b"{}"))
        except (ValueError, TypeError):
            said = {}
        if response.status >= 400:
            raise Refusal(response.status, str(said.get("message") or response.reason), response.headers)
        if response.status >= 300:
            raise SERVICE.elsewhere(sandbox_id)
        if what == "get" or "id" in said:
            SERVICE.check_about(sandbox_id, said.get("id"))
        return {"destroyed": End.GONE, "destroying": End.ENDING}.get(str(said.get("state")), otherwise)

    return await SERVICE.call(CALL_SECONDS + 1.0, answer(), what, sandbox_id)
