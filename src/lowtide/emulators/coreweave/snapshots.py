"""File-system snapshots: the content of one scratch volume, kept as an archive after its sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cwsandbox._proto import sandbox_pb2 as pb

from lowtide.emulators.coreweave.model import Box, new_id, stamp
from lowtide.emulators.coreweave.refusal import Code, Refused, invalid
from lowtide.errors import LowtideError
from lowtide.providers.base import STDOUT

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground


@dataclass(eq=False, slots=True, kw_only=True)
class Snapshot:
    message: Any
    file: Path


class Snapshots:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.table: dict[str, Snapshot] = {}

    def get(self, snapshot_id: str) -> Snapshot:
        try:
            return self.table[snapshot_id]
        except KeyError:
            raise Refused(
                Code.NOT_FOUND, f"file-system snapshot {snapshot_id} not found", "CWSANDBOX_FSS_NOT_FOUND"
            ) from None

    def begin(self, box: Box, volume: str, trigger: int, request_id: str = "") -> Any:
        """Written down; its content is taken with `take`. The same request twice is one snapshot."""
        volume = self.volume_of(box, volume)
        source = (request_id, box.sandbox_id, volume)
        for one in (one.message for one in self.table.values()):
            if request_id and (one.request_id, one.source_sandbox_id, one.source_volume_name) == source:
                return one
        made = pb.FileSystemSnapshot(
            file_system_snapshot_id=new_id(),
            state=pb.SNAPSHOT_STATE_CREATING,
            source_sandbox_id=box.sandbox_id,
            source_volume_name=volume,
            trigger=trigger,
            object_bucket="lowtide-snapshots",
            request_id=request_id,
        )
        stamp(made.create_time, self._ground.clock.now())
        stamp(made.updated_at, self._ground.clock.now())
        folder = self._ground.state.directory / "coreweave-snapshots"
        folder.mkdir(mode=0o700, exist_ok=True)
        file = folder / f"{made.file_system_snapshot_id}.tar"
        self.table[made.file_system_snapshot_id] = Snapshot(message=made, file=file)
        return made

    @staticmethod
    def volume_of(box: Box, volume: str) -> str:
        """The scratch volume that is meant. Raises `Refused`."""
        scratch = [v.name for v in box.spec.volumes if not v.volume_id]
        if not scratch:
            raise Refused(
                Code.FAILED_PRECONDITION, "the sandbox has no scratch volume", "CWSANDBOX_FSS_NOT_SUPPORTED"
            )
        if not volume and len(scratch) > 1:
            raise invalid("scratch_volume_name", "is required where there are several")
        volume = volume or scratch[0]
        if volume not in scratch:
            raise invalid("scratch_volume_name", f"no scratch volume {volume!r}")
        return volume

    async def take(self, snapshot_id: str, backing_id: str, directory: str) -> None:
        """Never raises: one that cannot be taken has failed, one that was deleted meanwhile is not kept."""
        snapshot = self.table.get(snapshot_id)
        if snapshot is None:
            return
        message, done = snapshot.message, False
        with contextlib.suppress(LowtideError, OSError):
            done = await self._write(snapshot, backing_id, directory)
        if snapshot_id not in self.table:
            snapshot.file.unlink(missing_ok=True)
            return
        message.state = pb.SNAPSHOT_STATE_READY if done else pb.SNAPSHOT_STATE_FAILED
        stamp(message.complete_time, self._ground.clock.now())
        stamp(message.updated_at, self._ground.clock.now())

    async def _write(self, snapshot: Snapshot, backing_id: str, directory: str) -> bool:
        words = ("/bin/sh", "-c", 'mkdir -p "$1" && exec tar -C "$1" -cf - .', "sh", directory)
        handle = await self._ground.backing.start(backing_id, words)
        try:
            with snapshot.file.open("wb") as out:
                async for stream, data in handle.output():
                    if stream == STDOUT:
                        await asyncio.to_thread(out.write, data)
                        snapshot.message.size_bytes = out.tell()
            return await handle.wait() == 0
        finally:
            await handle.aclose()

    async def restore(self, snapshot_id: str, backing_id: str, directory: str) -> None:
        snapshot = self.get(snapshot_id)
        if snapshot.message.state != pb.SNAPSHOT_STATE_READY:
            raise Refused(Code.FAILED_PRECONDITION, "the snapshot is not ready", "CWSANDBOX_FSS_NOT_READY")
        words = ("/bin/sh", "-c", 'mkdir -p "$1" && exec tar -C "$1" -xf -', "sh", directory)
        handle = await self._ground.backing.start(backing_id, words, stdin=True)
        try:
            with snapshot.file.open("rb") as source:
                while data := await asyncio.to_thread(source.read, 1 << 20):
                    await handle.write_stdin(data)
            await handle.close_stdin()
            async for _ in handle.output():
                pass
            if await handle.wait() != 0:
                raise Refused(Code.INTERNAL, "the snapshot was not restored", "CWSANDBOX_FSS_RESTORE_FAILED")
        finally:
            await handle.aclose()

    def delete(self, snapshot_id: str) -> None:
        snapshot = self.table.pop(snapshot_id)
        with contextlib.suppress(FileNotFoundError):
            snapshot.file.unlink()
