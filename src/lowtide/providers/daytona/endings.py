"""Deleting a sandbox: asked by id, confirmed by id, and honest about what could not be done.

404 is success. 409 means another change is under way, and is asked again. 403 means the key may not
delete: then the sandbox is stopped, which ends one that is set to be deleted when it stops, and if it
is still there after that, the error says so. A list is never taken for an answer: it lags.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers.daytona import asking
from lowtide.providers.daytona.asking import CALL_SECONDS
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import mapped, status_of, translated

if TYPE_CHECKING:
    from daytona import AsyncDaytona

log = logging.getLogger("lowtide.daytona")

BUSY_SECONDS = 30.0
"""How long another change of the sandbox's state may keep a delete waiting."""
CONFIRM_SECONDS = 20.0
"""How long an accepted delete may take. After that the caller tries again; nothing is forgotten."""


async def delete(sdk: AsyncDaytona, sandbox_id: str) -> bool:
    """True: deleted now, confirmed. False: it was already gone."""
    api: Any = sdk._sandbox_api
    deadline = time.monotonic() + BUSY_SECONDS
    delay = 0.05
    while True:
        began = time.monotonic()
        try:
            became = await asking.delete(api, sandbox_id)
        except errors.LowtideError:
            raise
        except Exception as error:
            status = status_of(error)
            if status in (404, 410):
                return False
            if status == 403:
                return await _stopped_instead(api, sandbox_id, error)
            found = translated(error, sandbox_id)
            if status != 409 or time.monotonic() > deadline:
                if found is None:
                    raise
                raise found from error
            log.info("sandbox %s: not deleted yet: %s", sandbox_id, error)
        else:
            if became != "destroyed":
                await _confirmed(api, sandbox_id, time.monotonic() - began)
            return True
        if await _is_gone(api, sandbox_id, ending=True):
            await _confirmed(api, sandbox_id)
            return True
        await asyncio.sleep(delay)
        delay = min(delay * 2, 2.0)


async def _confirmed(api: Any, sandbox_id: str, answered_in: float = 0.03) -> None:
    """An accepted delete is not always one that happened: one that is not under way is asked for again.

    `answered_in`: how long a call takes here. Asking much more often than that tells nothing sooner.
    """
    deadline = time.monotonic() + CONFIRM_SECONDS
    delay = min(max(answered_in * 0.25, 0.0005), 0.05)
    await asyncio.sleep(delay)  # it was just said not to be gone yet
    while not await _is_gone(api, sandbox_id):
        if time.monotonic() > deadline:
            raise errors.SandboxUnavailableError(
                f"Daytona accepted the deletion of {sandbox_id}, but it is still there",
                provider="daytona",
                sandbox_id=sandbox_id,
            )
        await asyncio.sleep(delay)
        delay = min(delay * 1.6, 1.0)
        if delay > 0.3 and not await _is_gone(api, sandbox_id, ending=True):
            with contextlib.suppress(Exception):
                await asking.delete(api, sandbox_id)


async def _is_gone(api: Any, sandbox_id: str, *, ending: bool = False) -> bool:
    """By id. With `ending`, one that is being destroyed counts too."""
    try:
        found = await asking.state(api, sandbox_id)
    except errors.LowtideError:
        raise
    except Exception as error:
        if status_of(error) in (404, 410):
            return True
        meant = translated(error, sandbox_id)
        if meant is None:
            raise
        raise meant from error
    return found in (("destroyed", "destroying") if ending else ("destroyed",))


async def _stopped_instead(api: Any, sandbox_id: str, refusal: Exception) -> bool:
    """Not allowed to delete: at least it runs no longer, and the lease stays in the ledger."""
    became = "it could not be stopped either"
    try:
        with mapped(sandbox_id):
            stopping = api.stop_sandbox(sandbox_id, force=True, _request_timeout=CALL_SECONDS)
            await within(CALL_SECONDS + 1.0, stopping, "stop", sandbox_id)
            became = "it was stopped instead"
            for _ in range(20):
                if await _is_gone(api, sandbox_id):
                    return True
                await asyncio.sleep(0.1)
    except errors.SandboxNotFoundError:
        return True
    except errors.LowtideError as error:
        log.warning("sandbox %s: not allowed to delete it, and stopping it failed: %s", sandbox_id, error)
    raise errors.AuthenticationError(
        f"this key may not delete sandbox {sandbox_id}; {became}. Delete it with a key that may",
        provider="daytona",
        sandbox_id=sandbox_id,
    ) from refusal
