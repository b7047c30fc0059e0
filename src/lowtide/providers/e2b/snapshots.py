"""Snapshots, and sandboxes that sleep."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.create import DEFAULT_LIFETIME
from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.e2b.lookup import CALL_SECONDS
from lowtide.providers.e2b.sdk import LazySandbox

SNAPSHOT_SECONDS = 300.0


async def snapshot(sdk: type[LazySandbox], access: Access, sandbox_id: str, name: str) -> str:
    parameters = {**access.parameters(), "request_timeout": SNAPSHOT_SECONDS}
    with SERVICE.mapped(sandbox_id):
        taking = sdk.create_snapshot(sandbox_id, name=name.lower(), **parameters)
        made = await SERVICE.within(SNAPSHOT_SECONDS + 5.0, taking, "snapshot", sandbox_id)
    return str(made.snapshot_id)


async def delete_snapshot(sdk: type[LazySandbox], access: Access, snapshot_id: str) -> bool:
    with SERVICE.mapped():
        deleting = sdk.delete_snapshot(snapshot_id, **access.parameters())
        return bool(await SERVICE.within(CALL_SECONDS, deleting, "delete a snapshot"))


async def list_snapshots(sdk: type[LazySandbox], access: Access) -> Sequence[str]:
    found: list[str] = []
    with SERVICE.mapped():
        pages = sdk.list_snapshots(limit=100, **access.parameters())
        while pages.has_next:
            items = await SERVICE.within(CALL_SECONDS, pages.next_items(), "list snapshots")
            found += [str(one.snapshot_id) for one in items]
    return found


async def pause(sdk: type[LazySandbox], access: Access, sandbox_id: str) -> None:
    with SERVICE.mapped(sandbox_id):
        pausing = sdk.pause(sandbox_id, **access.parameters())  # False: it already was
        await SERVICE.within(SNAPSHOT_SECONDS, pausing, "pause", sandbox_id)


async def resume(sdk: type[LazySandbox], access: Access, sandbox_id: str) -> LazySandbox:
    """E2B gives it a new lifetime, because a paused one has none; renewal takes over from there."""
    with SERVICE.mapped(sandbox_id):
        resuming = sdk.connect(sandbox_id, timeout=DEFAULT_LIFETIME, **access.parameters())
        return await SERVICE.within(SNAPSHOT_SECONDS, resuming, "resume", sandbox_id)
