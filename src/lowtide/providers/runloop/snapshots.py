"""Disk snapshots: taken in the background, waited for, listed, deleted."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.runloop.errors import SERVICE
from lowtide.providers.runloop.lookup import CALL_SECONDS

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

SNAPSHOT_SECONDS = 600.0
_DELETE_SECONDS = 5.0


async def take(client: AsyncRunloop, sandbox_id: str, name: str) -> str:
    """The id of a whole snapshot. One that is not whole within ten minutes, or given up meanwhile, is deleted."""
    snapshots = client.devboxes.disk_snapshots
    work = client.devboxes.snapshot_disk_async(sandbox_id, name=name)
    made = await SERVICE.call(CALL_SECONDS, work, "snapshot", sandbox_id)
    try:
        async with asyncio.timeout(SNAPSHOT_SECONDS):
            for delay in hosted.backoff(0.02, 2.0, factor=1.5):
                found = await SERVICE.again(lambda: snapshots.query_status(made.id), "snapshot", sandbox_id)
                if found.status != "in_progress":
                    break
                await asyncio.sleep(delay)
        if found.status != "complete":
            words = f"the snapshot could not be taken: {found.error_message or found.status}"
            raise errors.SandboxError(words, provider=SERVICE.provider, sandbox_id=sandbox_id)
    except BaseException:
        with contextlib.suppress(errors.LowtideError, TimeoutError):
            async with asyncio.timeout(_DELETE_SECONDS):
                await delete(client, made.id)
        raise
    return str(made.id)


async def delete(client: AsyncRunloop, snapshot_id: str) -> bool:
    """False: there was none. What is deleted stays known to Runloop, as deleted."""
    snapshots = client.devboxes.disk_snapshots
    try:
        if not hosted.is_word(snapshot_id):
            return False
        if (await SERVICE.again(lambda: snapshots.query_status(snapshot_id), "snapshot")).status == "deleted":
            return False
        await SERVICE.again(lambda: snapshots.delete(snapshot_id), "delete a snapshot")
    except (errors.SandboxFailedError, errors.SandboxNotFoundError):
        return False
    return True


async def listed(client: AsyncRunloop) -> list[str]:
    async def all_of_them() -> list[str]:
        return [str(one.id) async for one in client.devboxes.disk_snapshots.list(limit=1000)]

    return await SERVICE.again(all_of_them, "list snapshots")
