"""What belongs to the organization: runners, templates, and the bucket of its snapshots."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from cwsandbox._proto import (
    discovery_pb2,
    discovery_pb2_grpc,
    sandbox_pb2,
    sandbox_template_pb2,
    sandbox_template_pb2_grpc,
    settings_pb2,
    settings_pb2_grpc,
)
from google.protobuf import empty_pb2

from lowtide.emulators.coreweave.model import OVER, new_id, stamp
from lowtide.emulators.coreweave.pages import page
from lowtide.emulators.coreweave.refusal import Code, Refused, invalid
from lowtide.emulators.coreweave.spec import RUNNER, RUNNER_GROUP, check_tags

if TYPE_CHECKING:
    from lowtide.emulators.coreweave import CoreWeaveEmulator

_ORGANIZATION = "lowtide"
_VISIBILITIES = (sandbox_pb2.VISIBILITY_PUBLIC, sandbox_pb2.VISIBILITY_PRIVATE)


class Runners(discovery_pb2_grpc.DiscoveryServiceServicer):  # type: ignore[misc]
    """This machine, as the one runner there is."""

    def __init__(self, emulator: CoreWeaveEmulator) -> None:
        self._emulator = emulator
        self._since = emulator.ground.clock.now()

    def _runner(self, view: int) -> Any:
        processors = (os.cpu_count() or 1) * 1000
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        found = discovery_pb2.AvailableRunner(
            runner_id=RUNNER, runner_group_id=RUNNER_GROUP, healthy=True, organization_id=_ORGANIZATION
        )
        stamp(found.connected_at, self._since)
        found.capabilities.max_cpu_millicores = processors
        found.capabilities.max_memory_bytes = memory
        found.capabilities.supported_architectures.append(machine)
        found.capabilities.supported_service_visibilities.extend(_VISIBILITIES)
        if view == discovery_pb2.RUNNER_VIEW_FULL:
            found.resources.available_cpu_millicores = processors
            found.resources.available_memory_bytes = memory
            running = [box for box in self._emulator.boxes.table.values() if box.state not in OVER]
            found.resources.running_sandboxes = len(running)
        return found

    async def ListAvailableRunners(self, request: Any, context: Any) -> Any:
        runner = self._runner(request.view)
        capable = runner.capabilities
        fits = (
            request.runner_group_id in ("", runner.runner_group_id)
            and not request.gpu_type
            and (not request.architecture or request.architecture in capable.supported_architectures)
            and request.service_visibility in (0, *_VISIBILITIES)
        )
        rows, token = page(request, [(RUNNER, runner)] if fits else [])
        return discovery_pb2.ListAvailableRunnersResponse(runners=rows, next_page_token=token)

    async def GetAvailableRunner(self, request: Any, context: Any) -> Any:
        if request.runner_id != RUNNER or request.organization_id not in ("", _ORGANIZATION):
            raise Refused(Code.NOT_FOUND, f"no runner {request.runner_id}", "CWSANDBOX_RUNNER_NOT_FOUND")
        return self._runner(discovery_pb2.RUNNER_VIEW_FULL)


class Templates(sandbox_template_pb2_grpc.SandboxTemplateServiceServicer):  # type: ignore[misc]
    def __init__(self, emulator: CoreWeaveEmulator) -> None:
        self._emulator = emulator
        self._table: dict[str, Any] = {}
        self._requests: dict[str, str] = {}

    def get(self, template_id: str, *, deleted: bool = False) -> Any:
        found = self._table.get(template_id)
        if found is None or (found.deleted and not deleted):
            raise Refused(
                Code.NOT_FOUND, f"sandbox template {template_id} not found", "CWSANDBOX_TEMPLATE_NOT_FOUND"
            )
        return found

    @staticmethod
    def merged(template: Any, overrides: Any) -> Any:
        """The template's spec, with everything the overrides hold in its place."""
        made = sandbox_pb2.PartialSandboxSpec()
        made.CopyFrom(template.spec)
        for field, _ in overrides.ListFields():
            made.ClearField(field.name)
        containers = list(overrides.containers)
        if len(containers) == len(template.spec.containers) == 1:
            made.containers.append(template.spec.containers[0])
            for field, _ in containers[0].ListFields():
                made.containers[0].ClearField(field.name)
        made.MergeFrom(overrides) if len(made.containers) != 1 else _overlay(made, overrides)
        whole = sandbox_pb2.SandboxSpec()
        whole.ParseFromString(made.SerializeToString())
        return whole

    async def CreateSandboxTemplate(self, request: Any, context: Any) -> Any:
        known = self._requests.get(request.request_id) if request.request_id else None
        if known is not None:
            return self._table[known]
        if not request.sandbox_template.display_name:
            raise invalid("sandbox_template.display_name", "is required")
        check_tags(request.sandbox_template.spec.tags)
        made = sandbox_template_pb2.SandboxTemplate(
            sandbox_template_id=new_id(),
            display_name=request.sandbox_template.display_name,
            revision=1,
        )
        made.spec.CopyFrom(request.sandbox_template.spec)
        stamp(made.create_time, self._emulator.ground.clock.now())
        stamp(made.update_time, self._emulator.ground.clock.now())
        self._table[made.sandbox_template_id] = made
        if request.request_id:
            self._requests[request.request_id] = made.sandbox_template_id
        return made

    async def GetSandboxTemplate(self, request: Any, context: Any) -> Any:
        return self.get(request.sandbox_template_id, deleted=request.show_deleted)

    async def ListSandboxTemplates(self, request: Any, context: Any) -> Any:
        found = [(key, one) for key, one in self._table.items() if request.show_deleted or not one.deleted]
        rows, token = page(request, found)
        return sandbox_template_pb2.ListSandboxTemplatesResponse(
            sandbox_templates=rows, next_page_token=token
        )

    async def UpdateSandboxTemplate(self, request: Any, context: Any) -> Any:
        template = self.get(request.sandbox_template_id)
        paths = list(request.update_mask.paths) or ["display_name", "spec"]
        for path in paths:
            if path == "display_name":
                template.display_name = request.sandbox_template.display_name
            elif path == "spec":
                check_tags(request.sandbox_template.spec.tags)
                template.spec.CopyFrom(request.sandbox_template.spec)
            else:
                raise invalid("update_mask", f"{path!r} cannot be changed")
        template.revision += 1
        stamp(template.update_time, self._emulator.ground.clock.now())
        return template

    async def DeleteSandboxTemplate(self, request: Any, context: Any) -> Any:
        template = self.get(request.sandbox_template_id)
        template.deleted = True
        stamp(template.delete_time, self._emulator.ground.clock.now())
        return empty_pb2.Empty()


def _overlay(made: Any, overrides: Any) -> None:
    """Everything but the container by merging; the container's own fields onto the template's."""
    rest = sandbox_pb2.PartialSandboxSpec()
    rest.CopyFrom(overrides)
    if overrides.containers:
        made.containers[0].MergeFrom(overrides.containers[0])
        rest.ClearField("containers")
    made.MergeFrom(rest)


class Settings(settings_pb2_grpc.SettingsServiceServicer):  # type: ignore[misc]
    """The bucket of file-system snapshots. Secret stores, object storage and builds are not here."""

    def __init__(self) -> None:
        self._bucket = settings_pb2.FileSystemSnapshotBucketConfig(
            mode=settings_pb2.FILE_SYSTEM_SNAPSHOT_BUCKET_MODE_CW_MANAGED,
            effective_bucket_name="lowtide-snapshots",
        )

    async def GetFileSystemSnapshotBucketConfig(self, request: Any, context: Any) -> Any:
        return self._bucket

    async def UpdateFileSystemSnapshotBucketConfig(self, request: Any, context: Any) -> Any:
        wanted = request.file_system_snapshot_bucket_config
        self._bucket.bucket_name, self._bucket.region = wanted.bucket_name, wanted.region
        managed = not wanted.bucket_name
        self._bucket.mode = (
            settings_pb2.FILE_SYSTEM_SNAPSHOT_BUCKET_MODE_CW_MANAGED
            if managed
            else settings_pb2.FILE_SYSTEM_SNAPSHOT_BUCKET_MODE_BRING_YOUR_OWN
        )
        self._bucket.effective_bucket_name = wanted.bucket_name or "lowtide-snapshots"
        return self._bucket
