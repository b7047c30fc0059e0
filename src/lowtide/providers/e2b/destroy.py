"""The end of a sandbox: asked for, and confirmed."""

from __future__ import annotations

from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.e2b.lookup import CALL_SECONDS, Requests
from lowtide.providers.hosted import End, delete

KILL_SECONDS = 20.0
CONFIRM_SECONDS = 10.0
"""How long a sandbox may still be there after its end was acknowledged."""


async def destroy(requests: Requests, sandbox_id: str) -> bool:
    """True: ended now, confirmed. False: it was already gone."""

    async def ask() -> End:
        work = requests.send("DELETE", sandbox_id)
        ended = await SERVICE.call(KILL_SECONDS, work, "kill", sandbox_id)
        return End.ACCEPTED if ended is not None else End.MISSING

    async def look() -> End:
        there = await SERVICE.call(CALL_SECONDS, requests.send("GET", sandbox_id), "get", sandbox_id)
        return End.THERE if there is not None else End.GONE

    return await delete(ask, look, service=SERVICE, sandbox_id=sandbox_id, confirm_seconds=CONFIRM_SECONDS)
