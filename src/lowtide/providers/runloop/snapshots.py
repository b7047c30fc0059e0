"""Disk snapshots: taken in the background, waited for, listed, deleted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.runloop.errors import SERVICE
from lowtide.providers.runloop.lookup import CALL_SECONDS, asked

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

SNAPSHOT_SECONDS = 600.0
_DELETE_SECONDS = 5.0


async def take(client: AsyncRunloop, sandbox_id: str, name: str) -> str:
    """The id of a whole snapshot. One that is not whole within ten minutes, or given up meanwhile, is deleted."""
    work = client.devboxes.snapshot_disk_async(sandbox_id, name=name, metadata={"lowtide-snapshot": name})
    made = await SERVICE.call(CALL_SECONDS, work, "snapshot", sandbox_id)
    try:
        await _whole(client, made.id, sandbox_id)
    except BaseException:
        with contextlib.suppress(errors.LowtideError, TimeoutError):
            async with asyncio.timeout(_DELETE_SECONDS):
                await delete(client, made.id)
        raise
    return str(made.id)


async def _whole(client: AsyncRunloop, snapshot_id: str, sandbox_id: str) -> None:
    deadline = time.monotonic() + SNAPSHOT_SECONDS
    for delay in hosted.backoff(0.02, 2.0, factor=1.5):
        found = await asked(
            lambda: client.devboxes.disk_snapshots.query_status(snapshot_id), "snapshot", sandbox_id
        )
        if found.status == "complete":
            return
        if found.status != "in_progress" or time.monotonic() > deadline:
            raise errors.SandboxError(
                f"the snapshot could not be taken: {found.error_message or found.status}",
                provider=SERVICE.provider,
                sandbox_id=sandbox_id,
            )
        await asyncio.sleep(delay)


async def delete(client: AsyncRunloop, snapshot_id: str) -> bool:
    """False: there was none. What is deleted stays known to Runloop, as deleted."""
    if not hosted.is_word(snapshot_id):
        return False
    snapshots = client.devboxes.disk_snapshots
    try:
        if (await asked(lambda: snapshots.query_status(snapshot_id), "snapshot")).status == "deleted":
            return False
        await asked(lambda: snapshots.delete(snapshot_id), "delete a snapshot")
    except (errors.SandboxFailedError, errors.SandboxNotFoundError):
        return False
    return True


async def listed(client: AsyncRunloop) -> list[str]:
    async def all_of_them() -> list[str]:
        return [str(one.id) async for one in client.devboxes.disk_snapshots.list(limit=1000)]

    return await asked(all_of_them, "list snapshots")
