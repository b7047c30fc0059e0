"""SandboxService: what happens inside a sandbox, commands and files and the log of its main process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from cwsandbox._proto import sandbox_pb2 as pb
from cwsandbox._proto import sandbox_pb2_grpc

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.coreweave import spec
from lowtide.emulators.coreweave.model import Box, stamp
from lowtide.emulators.coreweave.refusal import Code, Refused, invalid
from lowtide.emulators.faults import FaultName
from lowtide.errors import LowtideError
from lowtide.providers.base import STDERR, STDOUT, ProcessHandle, TerminalSize

if TYPE_CHECKING:
    from lowtide.emulators.coreweave import CoreWeaveEmulator

LARGEST_FILE = 32 << 20
_LARGEST_OUTPUT = 64 << 20
_STREAMS = {
    STDOUT: pb.ExecStreamOutput.STREAM_STDOUT,
    STDERR: pb.ExecStreamOutput.STREAM_STDERR,
}
_FILE_REASONS = {
    "ENOENT": (Code.NOT_FOUND, "CWSANDBOX_FILE_NOT_FOUND"),
    "EISDIR": (Code.FAILED_PRECONDITION, "CWSANDBOX_FILE_IS_DIRECTORY"),
    "EACCES": (Code.PERMISSION_DENIED, "CWSANDBOX_FILE_PERMISSION_DENIED"),
    "EPERM": (Code.PERMISSION_DENIED, "CWSANDBOX_FILE_PERMISSION_DENIED"),
    "EROFS": (Code.PERMISSION_DENIED, "CWSANDBOX_FILE_PERMISSION_DENIED"),
}


class Inside(sandbox_pb2_grpc.SandboxServiceServicer):  # type: ignore[misc]
    def __init__(self, emulator: CoreWeaveEmulator) -> None:
        self.emulator, self.ground, self.boxes = emulator, emulator.ground, emulator.boxes

    def _box(self, request: Any) -> Box:
        """The one that is meant, running, in its only container."""
        box = self.boxes.get(request.sandbox_id)
        if request.container not in ("", box.container.name):
            raise invalid("container", f"no container {request.container!r} in this sandbox")
        _ = box.backing
        return box

    # ------------------------------------------------------------ commands

    async def StreamExec(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            init = (await anext(requests)).init
        except StopAsyncIteration:
            raise invalid("init", "is required") from None
        if not init.sandbox_id:
            raise invalid("init", "comes first")
        spec.check_command(init.command, "init.command")
        spec.check_environment(init.env, "init.env")
        size = _size(init.tty_width or 80, init.tty_height or 24) if init.tty else None
        box = self._box(init)
        handle = await self.boxes.start(
            box, tuple(init.command), environment=dict(init.env), stdin=True, tty=size
        )
        self.ground.requests.note("coreweave", "exec", {"sandbox_id": init.sandbox_id})
        facts = {**box.facts, "operation": "exec"}
        feeding = asyncio.ensure_future(_feed(requests, handle))
        cutting = asyncio.ensure_future(box.cut.wait())
        output: asyncio.Queue[tuple[int, bytes] | int | None] = asyncio.Queue(maxsize=16)
        reading = asyncio.ensure_future(_read(handle, output))
        dropping = self._mishaps(box, facts, context)
        coming: asyncio.Future[Any] | None = None
        try:
            ready = pb.ExecStreamResponse()
            stamp(ready.ready.ready_time, self.ground.clock.now())
            yield ready
            while True:
                coming = asyncio.ensure_future(output.get())
                await asyncio.wait({coming, cutting}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    raise Refused(
                        Code.FAILED_PRECONDITION, "the sandbox has ended", "CWSANDBOX_SANDBOX_NOT_RUNNING"
                    )
                piece = coming.result()
                if piece is None:
                    raise Refused(Code.UNAVAILABLE, "the command was lost", "CWSANDBOX_RUNNER_UNAVAILABLE")
                if isinstance(piece, int):
                    ended = pb.ExecStreamResponse()
                    ended.exit.exit_code = piece
                    stamp(ended.exit.completed_time, self.ground.clock.now())
                    yield ended
                    return
                yield pb.ExecStreamResponse(
                    output=pb.ExecStreamOutput(stream=_STREAMS[piece[0]], data=piece[1])
                )
        finally:
            for task in (feeding, cutting, reading, *dropping, coming):
                if task is not None:
                    task.cancel()
            # A command whose caller has left is ended, as the service's deadline ends it.
            with contextlib.suppress(LowtideError):
                await asyncio.shield(asyncio.ensure_future(_leave(handle)))

    def _mishaps(self, box: Box, facts: dict[str, str], context: Any) -> list[asyncio.Future[Any]]:
        found: list[asyncio.Future[Any]] = []
        take = self.ground.faults.take
        if fault := take(FaultName.GONE_MID_COMMAND, "coreweave", facts):
            gone_after = fault.seconds or 0.5

            async def vanish() -> None:
                await asyncio.sleep(gone_after)
                self.boxes.end(box, 0.0, pb.STATE_FAILED, "the node was lost")

            self.boxes.begin(vanish())
        if fault := take(FaultName.EXEC_DROPPED, "coreweave", facts):
            drop_after = fault.seconds or 0.0

            async def drop() -> None:
                await asyncio.sleep(drop_after)
                self.emulator.relay.drop(context.peer())

            found.append(asyncio.ensure_future(drop()))
        return found

    async def Exec(self, request: Any, context: Any) -> Any:
        spec.check_command(request.command, "command")
        spec.check_environment(request.env, "env")
        if request.max_output_bytes < 0:
            raise invalid("max_output_bytes", "must not be negative")
        box = self._box(request)
        most = min(request.max_output_bytes or _LARGEST_OUTPUT, _LARGEST_OUTPUT)
        handle = await self.boxes.start(box, tuple(request.command), environment=dict(request.env))
        kept = {STDOUT: bytearray(), STDERR: bytearray()}
        produced = {STDOUT: 0, STDERR: 0}
        try:
            async for stream, data in handle.output():
                produced[stream] += len(data)
                kept[stream] += data[: max(0, most - len(kept[stream]))]
            code = await handle.wait()
        finally:
            await asyncio.shield(asyncio.ensure_future(_leave(handle)))
        return pb.ExecResponse(
            stdout=bytes(kept[STDOUT]),
            stderr=bytes(kept[STDERR]),
            exit_code=code,
            stdout_truncated=produced[STDOUT] > len(kept[STDOUT]),
            stderr_truncated=produced[STDERR] > len(kept[STDERR]),
            stdout_bytes_produced=produced[STDOUT],
            stderr_bytes_produced=produced[STDERR],
        )

    async def StreamLogs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.tail_lines < 0:
            raise invalid("tail_lines", "must not be negative")
        resumed = bool(request.resume_log_session_id)
        if resumed and (request.timestamps or request.tail_lines or request.HasField("since_time")):
            raise invalid("resume_log_session_id", "goes with no timestamps, tail_lines or since_time")
        box = self._box(request)
        assert box.log is not None
        async for entry in box.log.stream(request, box.cut):
            yield entry

    # ------------------------------------------------------------ files

    async def WriteFile(self, request: Any, context: Any) -> Any:
        spec.check_path(request.path, "path")
        _check_size(len(request.content), request.path)
        box = self._box(request)
        with _file_errors(request.path):
            await self.boxes.write(box, request.path, request.content)
        return pb.WriteFileResponse()

    async def ReadFile(self, request: Any, context: Any) -> Any:
        spec.check_path(request.path, "path")
        box = self._box(request)
        content = bytearray()
        with _file_errors(request.path):
            _, pieces = await (await self.boxes.agent(box)).read_file(request.path)
            async with contextlib.aclosing(pieces) as reading:  # type: ignore[type-var]
                async for piece in reading:
                    content += piece
                    _check_size(len(content), request.path)
        return pb.ReadFileResponse(content=bytes(content))


@contextlib.contextmanager
def _file_errors(path: str) -> Any:
    try:
        yield
    except AgentError as error:
        code, reason = _FILE_REASONS.get(error.kind, (Code.FAILED_PRECONDITION, "CWSANDBOX_FILE_IO_FAILED"))
        raise Refused(code, f"{path}: {error}", reason, metadata={"filepath": path}) from None


def _check_size(size: int, path: str) -> None:
    if size > LARGEST_FILE:
        raise Refused(
            Code.RESOURCE_EXHAUSTED,
            f"{path}: larger than {LARGEST_FILE} bytes",
            "CWSANDBOX_FILE_TOO_LARGE",
            metadata={"filepath": path, "size_bytes": str(size), "max_size_bytes": str(LARGEST_FILE)},
        )


def _size(width: int, height: int) -> TerminalSize:
    if not (1 <= width <= 10_000 and 1 <= height <= 10_000):
        raise invalid("resize", "must be from 1 to 10000")
    return TerminalSize(columns=width, rows=height)


async def _feed(requests: AsyncIterator[Any], handle: ProcessHandle) -> None:
    """What the caller sends, to the command. It may close its input long before it ends."""
    open_ = True
    with contextlib.suppress(LowtideError, Refused):
        async for request in requests:
            kind = request.WhichOneof("message")
            with contextlib.suppress(BrokenPipeError):
                if kind == "stdin" and open_:
                    await handle.write_stdin(request.stdin)
                elif kind == "close" and open_:
                    open_ = False
                    await handle.close_stdin()
                elif kind == "resize":
                    await handle.resize(_size(request.resize.width, request.resize.height))
        if open_:
            await handle.close_stdin()


async def _read(handle: ProcessHandle, output: asyncio.Queue[Any]) -> None:
    try:
        async for piece in handle.output():
            await output.put(piece)
        await output.put(await handle.wait())
    except LowtideError:
        await output.put(None)


async def _leave(handle: ProcessHandle) -> None:
    try:
        await handle.terminate(0.0)
    finally:
        await handle.aclose()
