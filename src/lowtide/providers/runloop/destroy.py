"""The end of a devbox: asked for, and confirmed by its status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.hosted import End
from lowtide.providers.runloop import lookup
from lowtide.providers.runloop.errors import SERVICE

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

SHUTDOWN_SECONDS = 20.0
_OVER = ("shutdown", "failure")
_ASKED = "api_shutdown"


async def destroy(client: AsyncRunloop, sandbox_id: str, *, alive: bool) -> bool:
    """True: ended now. False: it was already gone. `alive`: whoever asks has made it, so that nobody need look first."""
    if not hosted.is_word(sandbox_id):
        return False

    async def look() -> End:
        try:
            work = client.devboxes.retrieve(sandbox_id)
            view = lookup.checked(
                await SERVICE.call(lookup.CALL_SECONDS, work, "get", sandbox_id), sandbox_id
            )
        except errors.SandboxNotFoundError:
            return End.GONE
        return End.GONE if view.status in _OVER else End.THERE

    async def ask() -> End:
        # By force: without, it waits for a snapshot of somebody else's.
        work = client.devboxes.shutdown(sandbox_id, force="true", timeout=SHUTDOWN_SECONDS)
        try:
            view = lookup.checked(
                await SERVICE.call(SHUTDOWN_SECONDS, work, "shutdown", sandbox_id), sandbox_id
            )
        except errors.SandboxNotFoundError:
            return End.MISSING
        except errors.SandboxUnavailableError as error:
            if hosted.status_of(error.__cause__) == 409:
                return End.BUSY
            raise
        return _answered(view)

    if not alive and await look() is End.GONE:
        return False
    return await hosted.delete(ask, look, service=SERVICE, sandbox_id=sandbox_id)


def _answered(view: Any) -> End:
    """The answer says what became of it: what ended for another reason had ended before."""
    if view.status not in _OVER:
        return End.ACCEPTED
    return End.GONE if view.status == "shutdown" and view.shutdown_reason in (None, _ASKED) else End.MISSING
