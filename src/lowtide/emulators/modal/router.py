"""TaskCommandRouter: commands in a sandbox, its main process's streams, readiness, and snapshots."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpclib import Status
from modal_proto import task_command_router_pb2 as pb

from lowtide.emulators.faults import FaultName
from lowtide.emulators.modal.account import check_variables
from lowtide.emulators.modal.calls import Call
from lowtide.emulators.modal.executions import Execution
from lowtide.emulators.modal.model import Box, Result
from lowtide.emulators.modal.refusal import Refused, invalid, not_found, not_there
from lowtide.emulators.modal.sandboxes import terminal

if TYPE_CHECKING:
    from lowtide.emulators.modal import ModalEmulator

FS_TOOL = "/__modal/.bin/modal-sandbox-fs-tools"
LONGEST_COMMAND = 1 << 16  # all arguments together
_LONG_POLL_SECONDS = 50.0
_TIMEOUT_MARGIN_SECONDS = 0.5


@cache
def _fs_tool() -> str:
    text = Path(__file__).with_name("fs_tool.py").read_text()
    return text.partition('"""')[2].partition('"""')[2].lstrip()  # the docstring is for readers


class Router:
    def __init__(self, emulator: ModalEmulator) -> None:
        self._emulator, self._ground, self._boxes = emulator, emulator.ground, emulator.boxes
        self._snapshots: dict[str, str] = {}

    def _execution(self, request: Any) -> Execution:
        found = self._boxes.of_task(request.task_id).executions.get(request.exec_id)
        if found is None:
            raise not_found("exec", request.exec_id)
        return found

    # ------------------------------------------------------------ commands

    async def TaskExecStart(self, request: Any, call: Call) -> Any:
        box = self._boxes.of_task(request.task_id)
        if request.container_id:
            raise not_there("sidecar containers")
        words = tuple(request.command_args)
        if not words or not words[0]:
            raise invalid("command_args", "is required")
        check_variables(request.env, "env")
        if not request.exec_id:
            raise invalid("exec_id", "is required")
        if sum(len(word.encode()) for word in words) > LONGEST_COMMAND:
            raise invalid("command_args", f"longer than {LONGEST_COMMAND} bytes together")
        if request.workdir and not request.workdir.startswith("/"):
            raise invalid("workdir", "must be absolute")
        backing_id = await box.running()
        async with box.lock:
            if request.exec_id in box.executions:
                return pb.TaskExecStartResponse()  # asked again: its answer was lost
            if box.ending is not None:
                raise Refused(Status.NOT_FOUND, f"task {box.task_id} has ended")
            execution = await self._start(box, backing_id, words, request)
            box.executions[request.exec_id] = execution
        self._boxes.hold(box)
        timer = None
        if request.timeout_secs:
            # The client keeps the time, too, and says -1: what it still waits for does not end before.
            moment = self._ground.clock.now() + request.timeout_secs + _TIMEOUT_MARGIN_SECONDS
            timer = self._ground.clock.at(moment, lambda: execution.handle.terminate(0.0))

        def ended() -> None:
            if timer is not None:
                timer.cancel()
            self._boxes.release(box)

        self._boxes.begin(execution.run(ended))
        self._mishaps(box, call)
        return pb.TaskExecStartResponse()

    async def _start(self, box: Box, backing_id: str, words: tuple[str, ...], request: Any) -> Execution:
        if words[0] == FS_TOOL:
            words = (sys.executable, "-I", "-S", "-c", _fs_tool(), *words[1:])
        secrets = self._emulator.secrets.environment(
            request.secret_ids, getattr(request, "secret_sources", ())
        )
        size = terminal(request.pty_info) if request.HasField("pty_info") else None
        environment = {**self._boxes.environment(box), **secrets, **dict(request.env)}
        if size is not None:
            environment.setdefault("TERM", request.pty_info.env_term or "xterm-256color")
        handle = await self._ground.backing.start(
            backing_id,
            words,
            cwd=request.workdir or self._boxes.workdir(box),
            environment=environment,
            stdin=True,
            tty=size,
        )
        keep = (
            request.stdout_config != pb.TASK_EXEC_STDOUT_CONFIG_DEVNULL,
            request.stderr_config != pb.TASK_EXEC_STDERR_CONFIG_DEVNULL,
        )
        merge = request.stderr_config == pb.TASK_EXEC_STDERR_CONFIG_STDOUT
        return Execution(handle, self._ground.state.directory, keep=keep, merge=merge)

    def _mishaps(self, box: Box, call: Call) -> None:
        facts, take = {**box.facts, "operation": "exec"}, self._ground.faults.take
        if fault := take(FaultName.GONE_MID_COMMAND, "modal", facts):
            gone_after = fault.seconds or 0.5

            async def vanish() -> None:
                await asyncio.sleep(gone_after)
                status = Result.GENERIC_STATUS_INTERNAL_FAILURE
                self._boxes.end(box, Result(status=status, exitcode=1, exception="the worker was lost"))

            self._boxes.begin(vanish())
        if fault := take(FaultName.EXEC_DROPPED, "modal", facts):
            drop_after = fault.seconds or 0.0

            async def drop() -> None:
                await asyncio.sleep(drop_after)
                call.drop()

            self._boxes.begin(drop())

    async def TaskExecStdioRead(self, request: Any, call: Call) -> AsyncIterator[Any]:
        execution = self._execution(request)
        second = request.file_descriptor == pb.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        output = execution.stderr if second else execution.stdout
        async for data in output.follow(request.offset):
            yield pb.TaskExecStdioReadResponse(data=data)
        if execution.lost:
            raise Refused(Status.NOT_FOUND, f"task {request.task_id} has ended")

    async def TaskExecWait(self, request: Any, call: Call) -> Any:
        execution = self._execution(request)
        try:
            await asyncio.wait_for(execution.over.wait(), _LONG_POLL_SECONDS)
        except TimeoutError:
            raise Refused(Status.DEADLINE_EXCEEDED, "it still runs") from None
        if execution.code is None:
            raise Refused(Status.NOT_FOUND, f"task {request.task_id} has ended")
        return pb.TaskExecWaitResponse(code=execution.code)

    async def TaskExecPoll(self, request: Any, call: Call) -> Any:
        execution = self._execution(request)
        if not execution.over.is_set():
            return pb.TaskExecPollResponse()
        if execution.code is None:
            raise Refused(Status.NOT_FOUND, f"task {request.task_id} has ended")
        return pb.TaskExecPollResponse(code=execution.code)

    async def TaskExecStdinWrite(self, request: Any, call: Call) -> Any:
        await self._execution(request).write(request.offset, request.data, request.eof)
        return pb.TaskExecStdinWriteResponse()

    async def TaskExecStdinWriteStream(self, requests: AsyncIterator[Any], call: Call) -> Any:
        execution, offset = None, 0
        async for request in requests:
            kind = request.WhichOneof("payload")
            if execution is None:
                if kind != "start":
                    raise invalid("start", "comes first")
                self._emulator.check_router_token(call, request.start.task_id)
                execution, offset = self._execution(request.start), request.start.offset
            elif kind == "data":
                await execution.write(offset, request.data, False)
                offset += len(request.data)
            elif kind == "end":
                await execution.write(offset, b"", True)
            else:
                raise invalid("payload", "is not known here")
        if execution is None:
            raise invalid("start", "is required")
        return pb.TaskExecStdinWriteStreamResponse()

    async def TaskExecStdinStatus(self, request: Any, call: Call) -> Any:
        written, closed = self._execution(request).input_state
        return pb.TaskExecStdinStatusResponse(num_bytes_written=written, closed=closed)

    # ------------------------------------------------------------ the main process

    async def SandboxStdioReadV2(self, request: Any, call: Call) -> AsyncIterator[Any]:
        box = self._boxes.of_task(request.task_id)
        await box.booted.wait()
        if box.main is None:
            return
        second = request.file_descriptor == pb.SANDBOX_STDIO_FILE_DESCRIPTOR_STDERR
        output, offset = box.main.stderr if second else box.main.stdout, request.offset
        async for data in output.follow(offset):
            yield pb.SandboxStdioReadV2Response(data=data, starting_offset=offset)
            offset += len(data)

    async def SandboxStdinWriteV2(self, request: Any, call: Call) -> Any:
        box = self._boxes.of_task(request.task_id)
        await box.running()
        assert box.main is not None
        await box.main.write(request.offset, request.data, request.eof)
        return pb.SandboxStdinWriteV2Response()

    async def SandboxWaitUntilReady(self, request: Any, call: Call) -> Any:
        ready_at = await self._emulator.until_ready(self._boxes.of_task(request.task_id), request.timeout)
        return pb.SandboxWaitUntilReadyTcrResponse(ready_at=ready_at)

    # ------------------------------------------------------------ snapshots

    async def TaskSnapshotFilesystem(self, request: Any, call: Call) -> Any:
        box = self._boxes.of_task(request.task_id)
        if request.container_id:
            raise not_there("sidecar containers")
        if request.customer_supplied_encryption_key:
            raise not_there("encryption keys of the customer")
        known = self._snapshots.get(request.snapshot_id)
        if known is None:
            backing_id = await box.running()
            taken = await asyncio.shield(self._ground.backing.snapshot(backing_id))
            image = self._emulator.images.keep(taken, box.image, request.ttl_seconds)
            known = self._snapshots[request.snapshot_id] = image.image_id
        return pb.TaskSnapshotFilesystemResponse(image_id=known)
