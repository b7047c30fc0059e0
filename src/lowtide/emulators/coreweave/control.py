"""SandboxService: creating, looking, listing and ending sandboxes, and their file-system snapshots."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from cwsandbox._proto import sandbox_pb2 as pb

from lowtide.emulators.coreweave import compose, spec
from lowtide.emulators.coreweave.inside import Inside
from lowtide.emulators.coreweave.model import OVER, Box, new_id
from lowtide.emulators.coreweave.pages import page
from lowtide.emulators.coreweave.refusal import Code, Refused, invalid, not_there
from lowtide.emulators.coreweave.sandboxes import grace
from lowtide.emulators.faults import FaultName

if TYPE_CHECKING:
    from lowtide.emulators.coreweave import CoreWeaveEmulator

_REQUESTS = 10_000


class Control(Inside):
    def __init__(self, emulator: CoreWeaveEmulator) -> None:
        super().__init__(emulator)
        self._requests: dict[str, tuple[str, bytes]] = {}

    # ------------------------------------------------------------ creating

    async def CreateSandbox(self, request: Any, context: Any) -> Any:
        return await self._made(
            self._create(request, request.sandbox.spec, request.sandbox.display_name, context)
        )

    async def CreateSandboxFromTemplate(self, request: Any, context: Any) -> Any:
        template = self.emulator.templates.get(request.template_id)
        merged = self.emulator.templates.merged(template, request.overrides)
        source = (template.sandbox_template_id, template.revision)
        return await self._made(self._create(request, merged, request.display_name, context, source))

    async def CreateSandboxFromFile(self, request: Any, context: Any) -> Any:
        return await self._made(self._create(request, compose.spec(request), request.display_name, context))

    @staticmethod
    async def _made(create: Coroutine[Any, Any, Any]) -> Any:
        """It goes on when the caller has left, whose call gRPC cancels: what it asked for is under way."""
        return await asyncio.shield(asyncio.get_running_loop().create_task(create))

    async def _create(
        self,
        request: Any,
        given: Any,
        display_name: str,
        context: Any,
        template: tuple[str, int] | None = None,
    ) -> Any:
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        if known := self._known(request.request_id, digest):
            return known.view(created=True)
        emulator, take = self.emulator, self.ground.faults.take
        wanted = spec.checked(given, emulator.volumes, emulator.snapshots.table)
        box = Box(
            sandbox_id=new_id(),
            spec=wanted,
            created_at=self.ground.clock.now(),
            display_name=display_name,
            template=template,
        )
        facts = {**box.facts, "operation": "create"}
        if take(FaultName.CREATE_FAILS, "coreweave", facts):
            raise Refused(Code.INTERNAL, "the sandbox could not be created")
        if fault := take(FaultName.CREATE_SLOW, "coreweave", facts):
            await asyncio.sleep(fault.seconds or 1.0)
            if known := self._known(request.request_id, digest):
                return known.view(created=True)
        slow = take(FaultName.START_SLOW, "coreweave", facts)
        broken = take(FaultName.CREATE_ERROR_STATE, "coreweave", facts) is not None
        self.boxes.create(box, slow=(slow.seconds or 1.0) if slow else 0.0, broken=broken)
        if request.request_id:
            self._requests[request.request_id] = box.sandbox_id, digest
            if len(self._requests) > _REQUESTS:
                del self._requests[next(iter(self._requests))]
        if take(FaultName.CREATE_LOST, "coreweave", facts):
            raise Refused(Code.UNAVAILABLE, "the answer was lost")
        if take(FaultName.CREATE_DROPPED, "coreweave", facts):
            emulator.relay.drop(context.peer())
            raise Refused(Code.UNAVAILABLE, "the connection was dropped")
        return box.view(created=True)

    def _known(self, request_id: str, digest: bytes) -> Box | None:
        """What the same request made before: it is made once, however often it is asked for."""
        if request_id not in self._requests:
            return None
        sandbox_id, before = self._requests[request_id]
        if before != digest:
            raise Refused(
                Code.ALREADY_EXISTS,
                f"the request id {request_id} was used for another request",
                "CWSANDBOX_REQUEST_ID_CONFLICT",
            )
        return self.boxes.table.get(sandbox_id)

    # ------------------------------------------------------------ looking

    async def GetSandbox(self, request: Any, context: Any) -> Any:
        return self.boxes.get(request.sandbox_id).view()

    async def ListSandboxes(self, request: Any, context: Any) -> Any:
        spec.check_tags(request.tags)
        lag = self.ground.faults.take(FaultName.LIST_LAGS, "coreweave", {"operation": "list"})
        as_of = self.ground.clock.now() - (lag.seconds or 1.0) if lag else None
        found = [
            (box.sandbox_id, box)
            for box in self.boxes.table.values()
            if set(request.tags) <= set(box.spec.tags) and _shown(request, box, as_of)
            if not request.runner_ids or spec.RUNNER in request.runner_ids
            if not request.volume_ids or {v.volume_id for v in box.spec.volumes} & set(request.volume_ids)
        ]
        descending = request.sort_direction != pb.SORT_DIRECTION_ASCENDING
        if descending:
            found.reverse()
        rows, token = page(request, found, descending=descending)
        return pb.ListSandboxesResponse(sandboxes=[box.view() for box in rows], next_page_token=token)

    # ------------------------------------------------------------ ending

    async def DeleteSandbox(self, request: Any, context: Any) -> Any:
        if request.grace_period_seconds < 0:
            raise invalid("grace_period_seconds", "must not be negative")
        box = self.boxes.table.get(request.sandbox_id)
        if box is None and request.allow_missing:
            return pb.DeleteSandboxResponse()
        box = self.boxes.get(request.sandbox_id)
        facts, take = {**box.facts, "operation": "delete"}, self.ground.faults.take
        if take(FaultName.KILL_FAILS, "coreweave", facts):
            raise Refused(Code.INTERNAL, "the sandbox could not be deleted")
        if take(FaultName.KILL_IGNORED, "coreweave", facts):
            return pb.DeleteSandboxResponse(sandbox=box.view())
        if box.ending is None and box.state not in OVER:
            snapshots = self.emulator.snapshots
            volumes = [snapshots.volume_of(box, volume) for volume in request.snapshot_volumes]
            for volume in dict.fromkeys(volumes):
                made = snapshots.begin(box, volume, pb.SNAPSHOT_TRIGGER_ON_DELETE, request.request_id)
                box.snapshots[made.file_system_snapshot_id] = volume
        hang = take(FaultName.KILL_HANGS, "coreweave", facts)
        if box.state not in OVER:
            self.boxes.end(
                box,
                grace(request.grace_period_seconds),
                pb.STATE_TERMINATED,
                "deleted",
                delay=(hang.seconds or 1.0) if hang else 0.0,
            )
        return pb.DeleteSandboxResponse(sandbox=box.view(), file_system_snapshot_ids=box.snapshots)

    async def PurgeSandboxes(self, request: Any, context: Any) -> Any:
        if bool(request.tags) == request.purge_all:
            raise invalid("tags", "exactly one of tags and purge_all is needed")
        spec.check_tags(request.tags)
        found = [
            box
            for box in self.boxes.table.values()
            if box.state not in OVER and set(request.tags) <= set(box.spec.tags)
        ]
        if not request.dry_run:
            for box in found:
                self.boxes.end(box, 0.0, pb.STATE_TERMINATED, "purged")
        return pb.PurgeSandboxesResponse(purge_count=len(found))

    # ------------------------------------------------------------ snapshots

    async def CreateFileSystemSnapshot(self, request: Any, context: Any) -> Any:
        box = self.boxes.get(request.sandbox_id)
        backing = box.backing
        made = self.emulator.snapshots.begin(
            box, request.scratch_volume_name, pb.SNAPSHOT_TRIGGER_MANUAL, request.request_id
        )
        if made.state == pb.SNAPSHOT_STATE_CREATING:
            work = self.emulator.snapshots.take(
                made.file_system_snapshot_id, backing, f"/.cwsandbox/volumes/{made.source_volume_name}"
            )
            self.boxes.begin(work)
        return made

    async def GetFileSystemSnapshot(self, request: Any, context: Any) -> Any:
        return self.emulator.snapshots.get(request.file_system_snapshot_id).message

    async def ListFileSystemSnapshots(self, request: Any, context: Any) -> Any:
        found = [
            (key, one.message)
            for key, one in self.emulator.snapshots.table.items()
            if request.source_sandbox_id in ("", one.message.source_sandbox_id)
        ]
        rows, token = page(request, found)
        return pb.ListFileSystemSnapshotsResponse(file_system_snapshots=rows, next_page_token=token)

    async def DeleteFileSystemSnapshot(self, request: Any, context: Any) -> Any:
        snapshots = self.emulator.snapshots
        if request.allow_missing and request.file_system_snapshot_id not in snapshots.table:
            return pb.FileSystemSnapshot()
        found = snapshots.get(request.file_system_snapshot_id)
        snapshots.delete(request.file_system_snapshot_id)
        found.message.state = pb.SNAPSHOT_STATE_DELETING
        return found.message

    # ------------------------------------------------------------ what is not here

    async def ConnectSandbox(self, request: Any, context: Any) -> Any:
        raise not_there("direct connections")

    async def GetSandboxBuildLogs(self, request: Any, context: Any) -> Any:
        raise not_there("building images")


def _shown(request: Any, box: Box, as_of: float | None) -> bool:
    over = box.state in OVER
    if as_of is not None:
        if box.created_at > as_of:
            return False
        over = over and (box.ended_at or 0.0) <= as_of
    if request.state != pb.STATE_UNSPECIFIED:
        return bool(box.state == request.state)
    return request.show_terminated or not over
