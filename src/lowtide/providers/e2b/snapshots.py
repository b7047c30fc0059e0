"""Snapshots, and sandboxes that sleep: a part of the provider."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.providers import hosted
from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.create import DEFAULT_LIFETIME
from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.e2b.lookup import CALL_SECONDS
from lowtide.providers.e2b.sdk import LazySandbox, SdkSandbox

SNAPSHOT_SECONDS = 300.0


class Snapshots:
    """What E2B does with a whole sandbox, memory and all."""

    _access: Access
    _known: dict[str, SdkSandbox]

    def _sdk(self) -> type[LazySandbox]:
        raise NotImplementedError

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        parameters = {**self._access.parameters(), "request_timeout": SNAPSHOT_SECONDS}
        with SERVICE.mapped(sandbox_id):
            taking = self._sdk().create_snapshot(sandbox_id, name=name.lower(), **parameters)
            made = await SERVICE.within(SNAPSHOT_SECONDS + 5.0, taking, "snapshot", sandbox_id)
        return str(made.snapshot_id)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        with SERVICE.mapped():
            deleting = self._sdk().delete_snapshot(snapshot_id, **self._access.parameters())
            return bool(await SERVICE.within(CALL_SECONDS, deleting, "delete a snapshot"))

    async def list_snapshots(self) -> Sequence[str]:
        found: list[str] = []
        with SERVICE.mapped():
            pages = self._sdk().list_snapshots(limit=100, **self._access.parameters())
            for _ in hosted.pages(SERVICE):
                if not pages.has_next:
                    break
                items = await SERVICE.within(CALL_SECONDS, pages.next_items(), "list snapshots")
                found += [str(one.snapshot_id) for one in items]
        return found

    async def pause(self, sandbox_id: str) -> None:
        with SERVICE.mapped(sandbox_id):
            pausing = self._sdk().pause(sandbox_id, **self._access.parameters())  # False: it already was
            await SERVICE.within(SNAPSHOT_SECONDS, pausing, "pause", sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        """E2B gives it a new lifetime, because a paused one has none; renewal takes over from there."""
        with SERVICE.mapped(sandbox_id):
            parameters = {**self._access.parameters(), "timeout": DEFAULT_LIFETIME}
            resuming = self._sdk().connect(sandbox_id, **parameters)
            resumed = await SERVICE.within(SNAPSHOT_SECONDS, resuming, "resume", sandbox_id)
        if sandbox_id in self._known:
            self._known[sandbox_id].sdk = resumed
