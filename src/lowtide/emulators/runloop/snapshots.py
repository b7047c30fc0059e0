"""Disk snapshots: taken of a devbox in the background, kept after it, and what a new one boots from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from lowtide.emulators.fields import TEXT, TEXTS, check_fields
from lowtide.emulators.runloop.model import Devbox, Refused, Snapshot, Status, new_id
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

Begin = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Snapshots:
    def __init__(self, ground: Ground, begin: Begin, drop: Callable[[str], Awaitable[None]]) -> None:
        self._ground = ground
        self._begin = begin
        self._drop = drop
        self.table: dict[str, Snapshot] = {}

    def get(self, snapshot_id: str) -> Snapshot:
        try:
            return self.table[snapshot_id]
        except KeyError:
            raise Refused(404, f"snapshot {snapshot_id} not found") from None

    def take(self, devbox: Devbox, asked: dict[str, Any]) -> tuple[Snapshot, asyncio.Task[None]]:
        check_fields(asked, {"name": TEXT, "commit_message": TEXT, "metadata": TEXTS})
        made = Snapshot(
            snapshot_id=new_id("snp"),
            source_id=devbox.devbox_id,
            created_at=self._ground.clock.now(),
            metadata=dict(asked.get("metadata") or {}),
            name=asked.get("name"),
            commit_message=asked.get("commit_message"),
        )
        if devbox.status not in (Status.RUNNING, Status.SUSPENDED):
            raise Refused(400, f"Devbox {devbox.devbox_id} is {devbox.status}")
        self.table[made.snapshot_id] = made
        devbox.snapshotting += 1

        async def work() -> None:
            try:
                async with devbox.lock:
                    made.backing_id = (
                        devbox.disk
                        if devbox.backing_id is None
                        else await self._ground.backing.snapshot(devbox.backing)
                    )
                made.status = "complete" if made.backing_id else "error"
            except (LowtideError, Refused) as error:
                made.status, made.error = "error", str(error)
            finally:
                devbox.snapshotting -= 1

        return made, self._begin(work())

    async def delete(self, snapshot: Snapshot) -> None:
        snapshot.status = "deleted"
        if snapshot.backing_id is not None:
            await self._drop(snapshot.backing_id)
