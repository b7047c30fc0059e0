"""ModalClient: environments, apps, secrets, images, and the life of sandboxes in both of their forms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from google.protobuf import empty_pb2
from grpclib import Status
from modal_proto import api_pb2 as pb

from lowtide.emulators.faults import FaultName
from lowtide.emulators.modal import definition
from lowtide.emulators.modal.account import NAME, check_variables
from lowtide.emulators.modal.calls import Call
from lowtide.emulators.modal.images import BUILDER_VERSION
from lowtide.emulators.modal.model import Box, Result, new_id, tags_of
from lowtide.emulators.modal.refusal import Refused, invalid, not_found

if TYPE_CHECKING:
    from lowtide.emulators.modal import ModalEmulator

_KEYS = 10_000
_PAGE = 100
_LONGEST_POLL_SECONDS = 50.0
_SUCCESS = Result.GENERIC_STATUS_SUCCESS


class Control:
    def __init__(self, emulator: ModalEmulator) -> None:
        self._emulator, self._ground, self._boxes = emulator, emulator.ground, emulator.boxes
        self._account, self._images, self._secrets = emulator.account, emulator.images, emulator.secrets
        self._made: dict[str, asyncio.Task[Box]] = {}

    # ------------------------------------------------------------ the workspace

    async def ClientHello(self, request: Any, call: Call) -> Any:
        return pb.ClientHelloResponse(image_builder_version=BUILDER_VERSION)

    async def AuthTokenGet(self, request: Any, call: Call) -> Any:
        return pb.AuthTokenGetResponse(token=self._emulator.tokens.issue("client"))

    async def TokenInfoGet(self, request: Any, call: Call) -> Any:
        return pb.TokenInfoGetResponse(
            token_id=self._emulator.token_id, workspace_id="ac-lowtide", workspace_name="lowtide"
        )

    async def WorkspaceNameLookup(self, request: Any, call: Call) -> Any:
        return pb.WorkspaceNameLookupResponse(workspace_name="lowtide", username="lowtide")

    async def EnvironmentGetOrCreate(self, request: Any, call: Call) -> Any:
        name = self._account.environment(request.deployment_name, request.object_creation_type)
        made = pb.EnvironmentGetOrCreateResponse(environment_id=self._account.environments[name])
        made.metadata.name = name
        made.metadata.settings.image_builder_version = BUILDER_VERSION
        return made

    async def EnvironmentList(self, request: Any, call: Call) -> Any:
        built = {"image_builder_version": BUILDER_VERSION}
        items = [
            _message(pb.EnvironmentListItem, name=name, environment_id=found, default=name == "main", **built)
            for name, found in self._account.environments.items()
        ]
        return pb.EnvironmentListResponse(items=items)

    async def AppGetOrCreate(self, request: Any, call: Call) -> Any:
        app = self._account.app(request.app_name, request.environment_name, request.object_creation_type)
        known = {"app_id": app.app_id, "description": app.name, "environment_name": app.environment}
        return _message(pb.AppGetOrCreateResponse, app_id=app.app_id, handle_metadata=known)

    async def AppLookup(self, request: Any, call: Call) -> Any:
        return pb.AppLookupResponse(
            app_id=self._account.app(request.app_name, request.environment_name).app_id
        )

    async def AppGetByDeploymentName(self, request: Any, call: Call) -> Any:
        app = self._account.app(request.name, request.environment_name)
        return pb.AppGetByDeploymentNameResponse(app_id=app.app_id, environment_name=app.environment)

    async def AppStop(self, request: Any, call: Call) -> Any:
        app = self._account.app_by_id(request.app_id)
        for box in self._boxes.table.values():
            if box.app is app and not box.is_over:
                self._boxes.end(box, Result(status=Result.GENERIC_STATUS_TERMINATED, exitcode=137))
        del self._account.apps[app.app_id]
        return empty_pb2.Empty()

    async def SecretGetOrCreate(self, request: Any, call: Call) -> Any:
        if request.app_id:
            self._account.app_by_id(request.app_id)
        secret = self._secrets.get_or_create(request, self._account.environment(request.environment_name))
        return pb.SecretGetOrCreateResponse(
            secret_id=secret.secret_id,
            metadata=_message(
                pb.SecretMetadata,
                name=secret.name,
                keys=list(secret.variables),
                environment_name=secret.environment,
            ),
        )

    async def SecretList(self, request: Any, call: Call) -> Any:
        environment = self._account.environment(request.environment_name)
        items = [
            pb.SecretListItem(
                label=one.name,
                created_at=one.created_at,
                secret_id=one.secret_id,
                environment_name=environment,
            )
            for one in self._secrets.table.values()
            if one.name and one.environment == environment
        ]
        return pb.SecretListResponse(items=items, environment_name=environment)

    async def SecretDelete(self, request: Any, call: Call) -> Any:
        self._secrets.get(request.secret_id)
        del self._secrets.table[request.secret_id]
        return empty_pb2.Empty()

    # ------------------------------------------------------------ images

    async def ImageGetOrCreate(self, request: Any, call: Call) -> Any:
        self._account.app_by_id(request.app_id)
        definition.check_image(request)
        image = self._images.get_or_create(request.image, again=request.force_build or request.ignore_cache)
        await asyncio.sleep(0)  # most of them are built by then
        return pb.ImageGetOrCreateResponse(
            image_id=image.image_id, result=image.result, metadata=image.metadata() if image.result else None
        )

    async def ImageJoinStreaming(self, request: Any, call: Call) -> AsyncIterator[Any]:
        image = self._images.get(request.image_id)
        sent = int(request.last_entry_id) if request.last_entry_id.isdecimal() else 0
        seconds = min(max(request.timeout, 0.0), _LONGEST_POLL_SECONDS)
        try:
            await asyncio.wait_for(image.built.wait(), seconds)
        except TimeoutError:
            return
        logs = [
            pb.TaskLogs(data=line, file_descriptor=pb.FILE_DESCRIPTOR_STDOUT) for line in image.log[sent:]
        ]
        yield pb.ImageJoinStreamingResponse(task_logs=logs, entry_id=str(len(image.log)))
        yield pb.ImageJoinStreamingResponse(result=image.result, metadata=image.metadata(), eof=True)

    async def ImageFromId(self, request: Any, call: Call) -> Any:
        image = self._images.get(request.image_id)
        return pb.ImageFromIdResponse(image_id=image.image_id, metadata=image.metadata())

    async def ImageDelete(self, request: Any, call: Call) -> Any:
        await self._images.delete(request.image_id)
        return empty_pb2.Empty()

    # ------------------------------------------------------------ creating

    async def SandboxCreateV2(self, request: Any, call: Call) -> Any:
        box = await self._create(request, call, first_form=False)
        return pb.SandboxCreateV2Response(
            sandbox_id=box.sandbox_id,
            task_id=box.task_id,
            metadata=box.metadata(),
            command_router_access=pb.CommandRouterAccess(
                url=self._emulator.router_url(call), jwt=self._emulator.tokens.issue(box.task_id)
            ),
            tunnels=box.tunnels,
        )

    async def SandboxCreate(self, request: Any, call: Call) -> Any:
        box = await self._create(request, call, first_form=True)
        return pb.SandboxCreateResponse(sandbox_id=box.sandbox_id, metadata=box.metadata())

    async def _create(self, request: Any, call: Call, *, first_form: bool) -> Box:
        """Made once for each idempotency key. It goes on when the caller has left: what it asked for is under way."""
        key = call.header("x-idempotency-key")
        task = self._made.get(key) if key else None
        if task is None:
            work = self._commit(request, first_form=first_form)
            task = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            if key:
                self._made[key] = task
                while len(self._made) > _KEYS:
                    del self._made[next(iter(self._made))]
        try:
            box = await asyncio.shield(task)
        except Exception:
            self._made.pop(key, None)  # nothing was made: asked again, it is tried again
            raise
        facts, take = {**box.facts, "operation": "create"}, self._ground.faults.take
        if take(FaultName.CREATE_LOST, "modal", facts):
            raise Refused(Status.UNAVAILABLE, "the answer was lost")
        if take(FaultName.CREATE_DROPPED, "modal", facts):
            call.drop()
            raise Refused(Status.UNAVAILABLE, "the connection was dropped")
        return box

    async def _commit(self, request: Any, *, first_form: bool) -> Box:
        app = self._account.app_by_id(request.app_id)
        wanted = definition.checked(request.definition)
        tags = definition.checked_tags(request.tags)
        sources = () if first_form else getattr(request, "secret_sources", ())  # not in 1.5
        variables = self._secrets.environment(wanted.secret_ids, sources)
        if not first_form:
            check_variables(request.ephemeral_secrets.contents, "ephemeral_secrets")
            variables.update(request.ephemeral_secrets.contents)
        variables.update(wanted.environment_variables.contents)
        box = Box(
            sandbox_id=new_id("sb", 22 if first_form else 26),
            task_id=new_id("ta", 22) if first_form else new_id("ta", 25) + "V",
            app=app,
            image=self._images.get(wanted.image_id),
            definition=wanted,
            environment=variables,
            tags=tags,
            name=wanted.name,
            created_at=self._boxes.moment(),
        )
        facts, take = {**box.facts, "operation": "create"}, self._ground.faults.take
        if take(FaultName.CREATE_FAILS, "modal", facts):
            raise Refused(Status.FAILED_PRECONDITION, "the sandbox could not be created")
        if fault := take(FaultName.CREATE_SLOW, "modal", facts):
            await asyncio.sleep(fault.seconds or 1.0)
        self._check_name(box)
        slow = take(FaultName.START_SLOW, "modal", facts)
        broken = take(FaultName.CREATE_ERROR_STATE, "modal", facts) is not None
        try:
            await self._emulator.tunnels.open(box)
            self._check_name(box)
            self._boxes.create(box, slow=(slow.seconds or 1.0) if slow else 0.0, broken=broken)
        except BaseException:
            self._emulator.tunnels.close(box)
            raise
        return box

    def _check_name(self, box: Box) -> None:
        if box.name and any(not one.is_over for one in self._boxes.named(box.app.app_id, box.name)):
            raise Refused(Status.ALREADY_EXISTS, f"Sandbox with name {box.name!r} already exists")

    # ------------------------------------------------------------ looking

    async def SandboxWaitV2(self, request: Any, call: Call) -> Any:
        box = self._boxes.get(request.sandbox_id)
        seconds = min(max(request.timeout, 0.0), _LONGEST_POLL_SECONDS)
        if seconds and not box.is_over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(box.over.wait(), seconds)
        return pb.SandboxWaitResponse(result=box.result, metadata=box.metadata())

    SandboxWait = SandboxWaitV2

    async def SandboxGetFromNameV2(self, request: Any, call: Call) -> Any:
        app = self._account.app(request.app_name, request.environment_name)
        found = self._boxes.named(app.app_id, request.sandbox_name)
        if not found or (found[0].is_over and not getattr(request, "include_terminated", False)):
            raise not_found("Sandbox", f"with name {request.sandbox_name!r}")
        return pb.SandboxGetFromNameResponse(sandbox_id=found[0].sandbox_id, metadata=found[0].metadata())

    SandboxGetFromName = SandboxGetFromNameV2

    async def SandboxListV2(self, request: Any, call: Call) -> Any:
        tags = definition.checked_tags(request.tags)
        environment = self._account.environment(request.environment_name)
        lag = self._ground.faults.take(FaultName.LIST_LAGS, "modal", {"operation": "list"})
        as_of = self._ground.clock.now() - (lag.seconds or 1.0) if lag else None
        found = [
            box
            for box in self._boxes.table.values()
            if (box.app.app_id == request.app_id if request.app_id else box.app.environment == environment)
            if tags.items() <= box.tags.items()
            if not request.before_timestamp or box.created_at < request.before_timestamp
            if _shown(box, as_of) or (request.include_finished and box.is_over)
        ]
        found.sort(key=lambda box: box.created_at, reverse=True)
        return pb.SandboxListResponse(sandboxes=[box.info() for box in found[:_PAGE]])

    SandboxList = SandboxListV2

    async def SandboxTagsGetV2(self, request: Any, call: Call) -> Any:
        return pb.SandboxTagsGetResponse(tags=tags_of(self._boxes.get(request.sandbox_id).tags))

    SandboxTagsGet = SandboxTagsGetV2

    async def SandboxTagsSetV2(self, request: Any, call: Call) -> Any:
        tags = definition.checked_tags(request.tags)
        self._boxes.get(request.sandbox_id).tags = tags
        return empty_pb2.Empty()

    SandboxTagsSet = SandboxTagsSetV2

    async def SandboxSetName(self, request: Any, call: Call) -> Any:
        box = self._boxes.get(request.sandbox_id)
        if not NAME.fullmatch(request.name):
            raise invalid("name", "letters, digits, . _ -, at most 63")
        if box.name and box.name != request.name:
            raise Refused(Status.FAILED_PRECONDITION, "the sandbox has a name")
        if not box.name and any(not one.is_over for one in self._boxes.named(box.app.app_id, request.name)):
            raise Refused(Status.ALREADY_EXISTS, f"Sandbox with name {request.name!r} already exists")
        box.name = request.name
        return pb.SandboxSetNameResponse()

    # ------------------------------------------------------------ the way in

    async def SandboxGetTaskIdV2(self, request: Any, call: Call) -> Any:
        box = self._boxes.get(request.sandbox_id)
        return pb.SandboxGetTaskIdResponse(task_id=box.task_id, task_result=box.result)

    SandboxGetTaskId = SandboxGetTaskIdV2

    async def SandboxGetCommandRouterAccess(self, request: Any, call: Call) -> Any:
        by_id = request.WhichOneof("target") == "sandbox_id"
        box = self._boxes.get(request.sandbox_id) if by_id else self._boxes.of_task(request.task_id)
        return pb.SandboxGetCommandRouterAccessResponse(
            jwt=self._emulator.tokens.issue(box.task_id), url=self._emulator.router_url(call)
        )

    async def TaskGetCommandRouterAccess(self, request: Any, call: Call) -> Any:
        box = self._boxes.of_task(request.task_id)
        return pb.TaskGetCommandRouterAccessResponse(
            jwt=self._emulator.tokens.issue(box.task_id), url=self._emulator.router_url(call)
        )

    async def SandboxGetTunnelsV2(self, request: Any, call: Call) -> Any:
        box = self._boxes.get(request.sandbox_id)
        return pb.SandboxGetTunnelsResponse(result=Result(status=_SUCCESS), tunnels=box.tunnels)

    SandboxGetTunnels = SandboxGetTunnelsV2

    async def SandboxWaitUntilReady(self, request: Any, call: Call) -> Any:
        ready_at = await self._emulator.until_ready(self._boxes.get(request.sandbox_id), request.timeout)
        return pb.SandboxWaitUntilReadyResponse(ready_at=ready_at)

    async def SandboxGetLogs(self, request: Any, call: Call) -> AsyncIterator[Any]:
        """The main process's streams in the first form; an entry's id is where it ends."""
        box = self._boxes.get(request.sandbox_id)
        await box.booted.wait()
        offset = int(request.last_entry_id) if request.last_entry_id.isdecimal() else 0
        if box.main is not None:
            second = request.file_descriptor == pb.FILE_DESCRIPTOR_STDERR
            output = box.main.stderr if second else box.main.stdout
            async for data in output.follow(offset):
                offset += len(data)
                item = pb.TaskLogs(
                    data=data.decode(errors="replace"), file_descriptor=request.file_descriptor
                )
                yield _message(
                    pb.TaskLogsBatch, items=[item], entry_id=str(offset), sandbox_id=box.sandbox_id
                )
        yield _message(pb.TaskLogsBatch, entry_id=str(offset), eof=True, sandbox_id=box.sandbox_id)

    async def SandboxStdinWrite(self, request: Any, call: Call) -> Any:
        box = self._boxes.get(request.sandbox_id)
        await box.running()
        assert box.main is not None
        if request.index > box.main_written:  # each write has a number, and comes again after a lost answer
            box.main_written = request.index
            await box.main.write(box.main.input_state[0], request.input, request.eof)
        return pb.SandboxStdinWriteResponse()

    async def SandboxSnapshotFs(self, request: Any, call: Call) -> Any:
        box = self._boxes.get(request.sandbox_id)
        taken = await asyncio.shield(self._ground.backing.snapshot(await box.running()))
        image = self._images.keep(taken, box.image, 0)
        return pb.SandboxSnapshotFsResponse(
            image_id=image.image_id, result=image.result, image_metadata=image.metadata()
        )

    # ------------------------------------------------------------ ending

    async def SandboxTerminateV2(self, request: Any, call: Call) -> Any:
        box = self._boxes.get(request.sandbox_id)
        facts, take = {**box.facts, "operation": "terminate"}, self._ground.faults.take
        if take(FaultName.KILL_FAILS, "modal", facts):
            raise Refused(Status.FAILED_PRECONDITION, "the sandbox could not be terminated")
        if take(FaultName.KILL_IGNORED, "modal", facts):
            return pb.SandboxTerminateResponse()
        if fault := take(FaultName.KILL_HANGS, "modal", facts):
            await asyncio.sleep(fault.seconds or 1.0)
        if box.is_over:
            return pb.SandboxTerminateResponse(existing_result=box.result)
        self._boxes.end(box, Result(status=Result.GENERIC_STATUS_TERMINATED, exitcode=137))
        return pb.SandboxTerminateResponse()

    SandboxTerminate = SandboxTerminateV2


def _shown(box: Box, as_of: float | None) -> bool:
    if as_of is None:
        return not box.is_over
    return box.created_at <= as_of and (not box.is_over or (box.ended_at or 0.0) > as_of)


def _message(kind: Any, **fields: Any) -> Any:
    """With those fields that the installed SDK's messages have: older ones have fewer."""
    return kind(**{name: value for name, value in fields.items() if name in kind.DESCRIPTOR.fields_by_name})
