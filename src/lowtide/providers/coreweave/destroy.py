"""The end of a sandbox: asked for once with its grace, then looked at until the service shows that it is over."""

from __future__ import annotations

import math

from lowtide.errors import SandboxNotFoundError
from lowtide.providers.base import SandboxState
from lowtide.providers.coreweave import lookup
from lowtide.providers.coreweave.access import messages
from lowtide.providers.coreweave.errors import SERVICE
from lowtide.providers.hosted import End, delete
from lowtide.providers.hosted.destroy import CONFIRM_SECONDS
from lowtide.providers.hosted.grpc_calls import Connections


async def destroy(connections: Connections, sandbox_id: str, grace_seconds: float, *, running: bool) -> bool:
    """True: ended now, confirmed. `running`: it is known to have run, so that one that is over was ended by this."""
    pb = messages()
    grace = max(0, math.ceil(grace_seconds))

    async def ask() -> End:
        asked = pb.DeleteSandboxRequest(sandbox_id=sandbox_id, grace_period_seconds=grace, allow_missing=True)
        # The SDK has no deadline here, and waits for a sandbox that is stuck for ever.
        answer = await connections.call("DeleteSandbox", asked, grace + 15.0, sandbox_id)
        if not answer.HasField("sandbox"):  # as for one that is not there, or for an answer that says nothing
            return End.MISSING if await look() is End.GONE else End.ACCEPTED
        if answer.sandbox.sandbox_id != sandbox_id:
            return End.ACCEPTED  # what is looked at next is this one
        state = lookup.info(answer.sandbox).state
        if state is SandboxState.GONE and running:
            return End.GONE
        return End.MISSING if state.terminal else End.ACCEPTED

    async def look() -> End:
        try:
            state = (await lookup.get(connections, sandbox_id)).state
        except SandboxNotFoundError:
            return End.GONE
        if state.terminal:
            return End.GONE
        return End.ENDING if state is SandboxState.ENDING else End.THERE

    return await delete(
        ask, look, service=SERVICE, sandbox_id=sandbox_id, confirm_seconds=CONFIRM_SECONDS + grace
    )
