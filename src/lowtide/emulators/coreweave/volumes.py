"""Registered volumes: kept and reported; in a sandbox each is an empty directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cwsandbox._proto import volume_pb2 as pb
from cwsandbox._proto import volume_pb2_grpc

from lowtide.emulators.coreweave.model import OVER, new_id, stamp
from lowtide.emulators.coreweave.pages import page
from lowtide.emulators.coreweave.refusal import Code, Refused, invalid

if TYPE_CHECKING:
    from lowtide.emulators.coreweave import CoreWeaveEmulator


class Volumes(volume_pb2_grpc.VolumeServiceServicer):  # type: ignore[misc]
    def __init__(self, emulator: CoreWeaveEmulator) -> None:
        self._emulator = emulator
        self._table: dict[str, Any] = {}
        self._requests: dict[str, str] = {}

    def get(self, volume_id: str) -> Any:
        try:
            return self._table[volume_id]
        except KeyError:
            raise Refused(
                Code.NOT_FOUND, f"volume {volume_id} not found", "CWSANDBOX_VOLUME_NOT_FOUND"
            ) from None

    def _attached(self, volume_id: str) -> int:
        return sum(
            volume.volume_id == volume_id
            for box in self._emulator.boxes.table.values()
            if box.state not in OVER
            for volume in box.spec.volumes
        )

    def _view(self, volume: Any) -> Any:
        volume.status.attached_sandbox_count = self._attached(volume.volume_id)
        return volume

    async def CreateVolume(self, request: Any, context: Any) -> Any:
        known = self._requests.get(request.request_id) if request.request_id else None
        if known in self._table:
            return self._view(self._table[known])
        if not request.volume.spec.pvc.claim_name:
            raise invalid("volume.spec.pvc.claim_name", "is required")
        made = pb.Volume(volume_id=new_id())
        made.spec.CopyFrom(request.volume.spec)
        made.status.state = pb.VOLUME_STATE_READY
        made.status.locality = pb.VOLUME_LOCALITY_CLUSTER_LOCAL
        made.status.access_modes.append("ReadWriteMany")
        for moment in (made.status.create_time, made.status.update_time, made.status.last_validated_time):
            stamp(moment, self._emulator.ground.clock.now())
        self._table[made.volume_id] = made
        if request.request_id:
            self._requests[request.request_id] = made.volume_id
        return made

    async def GetVolume(self, request: Any, context: Any) -> Any:
        return self._view(self.get(request.volume_id))

    async def ListVolumes(self, request: Any, context: Any) -> Any:
        found = [
            (key, self._view(volume))
            for key, volume in self._table.items()
            if not request.states or volume.status.state in request.states
            if not request.runner_ids or volume.spec.pvc.runner_id in request.runner_ids
        ]
        rows, token = page(request, found)
        return pb.ListVolumesResponse(volumes=rows, next_page_token=token)

    async def UpdateVolume(self, request: Any, context: Any) -> Any:
        volume = self.get(request.volume_id)
        for path in request.update_mask.paths:
            if path not in ("spec.description", "spec.read_only"):
                raise invalid("update_mask", f"{path!r} cannot be changed")
            name = path.partition(".")[2]
            setattr(volume.spec, name, getattr(request.volume.spec, name))
        stamp(volume.status.update_time, self._emulator.ground.clock.now())
        return self._view(volume)

    async def DeleteVolume(self, request: Any, context: Any) -> Any:
        if request.volume_id not in self._table and request.allow_missing:
            return pb.Volume()
        self.get(request.volume_id)
        if self._attached(request.volume_id) and not request.force:
            raise Refused(Code.FAILED_PRECONDITION, "the volume is in use", "CWSANDBOX_VOLUME_IN_USE")
        return self._table.pop(request.volume_id)

    async def ValidateVolume(self, request: Any, context: Any) -> Any:
        volume = self.get(request.volume_id)
        stamp(volume.status.last_validated_time, self._emulator.ground.clock.now())
        return self._view(volume)
