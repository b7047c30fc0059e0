"""Snapshots of sandboxes: taken, listed, deleted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers.daytona.errors import SERVICE
from lowtide.providers.daytona.lookup import CALL_SECONDS, STATE_SECONDS

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

_PAGE = 100


async def take(sdk: AsyncDaytona, sandbox: AsyncSandbox, name: str) -> str:
    """Returns when others can start from it."""
    await SERVICE.call(STATE_SECONDS, sandbox.create_snapshot(name, timeout=0), "snapshot", sandbox.id)
    deadline = time.monotonic() + STATE_SECONDS
    while True:
        found = await SERVICE.call(CALL_SECONDS, sdk.snapshot.get(name), "snapshot", sandbox.id)
        if str(getattr(found.state, "value", "")) in ("active", "inactive"):
            return name
        if time.monotonic() > deadline:
            raise errors.RequestTimeoutError(
                f"snapshot {name} did not become active", provider="daytona", sandbox_id=sandbox.id
            )
        await asyncio.sleep(0.2)


async def delete(sdk: AsyncDaytona, snapshot_id: str) -> bool:
    try:
        await SERVICE.call(CALL_SECONDS, sdk.snapshot.delete(snapshot_id), "delete a snapshot")
    except errors.SandboxNotFoundError:
        return False
    return True


async def own(sdk: AsyncDaytona) -> Sequence[str]:
    """The account's own, not those that Daytona offers to everybody."""
    found: list[str] = []
    page = 1
    while True:
        asking = sdk.snapshot.list(page=page, limit=_PAGE)
        listed = await SERVICE.call(CALL_SECONDS, asking, "list snapshots")
        found += [
            str(one.name)
            for one in listed.items
            if not one.general and str(getattr(one.state, "value", one.state)) != "removing"
        ]
        if page >= int(listed.total_pages or 1):
            return found
        page += 1
