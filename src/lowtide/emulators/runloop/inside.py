"""The calls about what happens inside a devbox: commands, their streams and input, files."""

from __future__ import annotations

import asyncio
import json
import posixpath
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.faults import FaultName
from lowtide.emulators.fields import FLAG, LIST_OF_TEXT, TEXT, check_fields, seconds
from lowtide.emulators.multipart import bytes_of, parts_of, pieces_of
from lowtide.emulators.request_check import json_object, query_number
from lowtide.emulators.runloop.executions import STREAMS, Execution
from lowtide.emulators.runloop.model import Devbox, Refused
from lowtide.emulators.web import drop

if TYPE_CHECKING:
    from lowtide.emulators.runloop import RunloopEmulator

_HOLD_SECONDS = 25.0
_SECONDS = seconds(60)
_MOST_LINES = 1_000_000
_MOST_FINISHED = 1000
_LOGGED_LINES, _LOGGED_CHARACTERS = 1000, 4096


class Inside:
    def __init__(self, emulator: RunloopEmulator) -> None:
        self.emulator = emulator
        self.ground = emulator.ground
        self.devboxes = emulator.devboxes

    def add_routes(self, app: web.Application) -> None:
        add = app.router.add_route
        one = "/v1/devboxes/{id}"
        add("POST", f"{one}/execute", self.execute)
        add("POST", f"{one}/execute_async", self.execute_async)
        add("POST", f"{one}/execute_sync", self.execute_sync)
        execution = f"{one}/executions/{{execution}}"
        add("GET", execution, self.get_execution)
        add("POST", f"{execution}/wait_for_status", self.wait_for_execution)
        add("POST", f"{execution}/kill", self.kill)
        add("POST", f"{execution}/send_std_in", self.send_std_in)
        add("GET", f"{execution}/stream_{{stream:stdout|stderr}}_updates", self.stream)
        add("POST", f"{one}/upload_file", self.upload_file)
        add("POST", f"{one}/download_file", self.download_file)
        add("POST", f"{one}/read_file_contents", self.read_file)
        add("POST", f"{one}/write_file_contents", self.write_file)

    def _running(self, request: web.Request) -> Devbox:
        return self.devboxes.running(request.match_info["id"])

    def _execution(self, request: web.Request) -> Execution:
        devbox = self.devboxes.get(request.match_info["id"])
        found = devbox.executions.get(request.match_info["execution"])
        if found is None:
            raise Refused(404, f"execution {request.match_info['execution']} not found")
        return found

    # ------------------------------------------------------------ commands

    async def _start(self, devbox: Devbox, asked: dict[str, Any]) -> Execution:
        """Once for each command id, however often it is asked for."""
        check_fields(
            asked,
            {
                "command": TEXT,
                "command_id": TEXT,
                "shell_name": TEXT,
                "attach_stdin": FLAG,
                "optimistic_timeout": _SECONDS,
            },
            required=("command",),
        )
        key = asked.get("command_id")
        if key and key in devbox.by_command:
            return devbox.by_command[key]
        stdin = bool(asked.get("attach_stdin"))
        handle = await self.devboxes.start(devbox, asked["command"], stdin=stdin)
        execution = Execution(devbox.devbox_id, handle, stdin=stdin)
        devbox.executions[execution.execution_id] = execution
        if key:
            devbox.by_command[key] = execution
        self._forget_old(devbox)
        self.emulator.background(self._log(devbox, execution, asked["command"]))
        return execution

    async def _log(self, devbox: Devbox, execution: Execution, command: str) -> None:
        more = {"cmd_id": execution.execution_id, "cmd": command}
        self.devboxes.log(devbox, "info", "exec", "Command started", **more)
        await execution.ended.wait()
        for name, stream in STREAMS.items():
            text, _ = execution.printed[stream].tail(_LOGGED_LINES)
            for line in text.splitlines()[-_LOGGED_LINES:]:
                self.devboxes.log(
                    devbox, "info" if name == "stdout" else "error", name, line[:_LOGGED_CHARACTERS], **more
                )
        self.devboxes.log(devbox, "info", "exec", "Command finished", exit_code=execution.exit_code, **more)

    @staticmethod
    def _forget_old(devbox: Devbox) -> None:
        finished = [one for one in devbox.executions.values() if one.ended.is_set()]
        for execution in finished[: max(0, len(finished) - _MOST_FINISHED)]:
            del devbox.executions[execution.execution_id]

    async def execute(self, request: web.Request) -> web.StreamResponse:
        asked = await json_object(request)
        lines = query_number(request, "last_n", 100, lowest=0, largest=_MOST_LINES)
        devbox = self._running(request)
        execution = await self._start(devbox, asked)
        await self._mishap(request, devbox, "execute")
        given = asked.get("optimistic_timeout")
        await self._wait(devbox, execution, _HOLD_SECONDS if given is None else given)
        return web.json_response(execution.view(lines))

    async def execute_async(self, request: web.Request) -> web.StreamResponse:
        asked = await json_object(request)
        devbox = self._running(request)
        execution = await self._start(devbox, asked)
        await self._mishap(request, devbox, "execute-async")
        return web.json_response(execution.view())

    async def execute_sync(self, request: web.Request) -> web.StreamResponse:
        asked = await json_object(request)
        devbox = self._running(request)
        execution = await self._start(devbox, asked)
        await self._wait(devbox, execution, 600.0)
        shown = execution.view(_MOST_LINES)
        if shown["status"] != "completed":
            raise Refused(408, "the command did not complete in time")
        return web.json_response(
            {key: shown[key] for key in ("devbox_id", "exit_status", "stdout", "stderr")}
        )

    async def _mishap(self, request: web.Request, devbox: Devbox, operation: str) -> None:
        facts = {**devbox.facts, "operation": operation}
        if fault := self.ground.faults.take(FaultName.GONE_MID_COMMAND, "runloop", facts):
            self.emulator.vanish(devbox, fault.seconds or 0.5)
        if fault := self.ground.faults.take(FaultName.EXEC_DROPPED, "runloop", facts):
            await asyncio.sleep(fault.seconds or 0.0)
            drop(request)
            raise asyncio.CancelledError

    async def _wait(self, devbox: Devbox, execution: Execution, seconds: float) -> bool:
        ended = asyncio.ensure_future(execution.wait(seconds))
        cut = asyncio.ensure_future(devbox.cut.wait())
        try:
            await asyncio.wait({ended, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise Refused(400, f"Devbox {devbox.devbox_id} has ended")
            return ended.result()
        finally:
            ended.cancel()
            cut.cancel()

    async def get_execution(self, request: web.Request) -> web.Response:
        lines = query_number(request, "last_n", 100, lowest=0, largest=_MOST_LINES)
        return web.json_response(self._execution(request).view(lines))

    async def wait_for_execution(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"statuses": LIST_OF_TEXT, "timeout_seconds": _SECONDS})
        lines = query_number(request, "last_n", 100, lowest=0, largest=_MOST_LINES)
        execution = self._execution(request)
        given = asked.get("timeout_seconds")
        if not await execution.wait(_HOLD_SECONDS if given is None else given):
            raise Refused(408, "the execution has not reached any of the statuses")
        return web.json_response(execution.view(lines))

    async def kill(self, request: web.Request) -> web.Response:
        check_fields(await json_object(request), {"kill_process_group": FLAG})
        execution = self._execution(request)
        await execution.kill()
        return web.json_response(execution.view())

    async def send_std_in(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"text": TEXT, "signal": TEXT})
        if asked.get("signal") not in (None, "EOF", "INTERRUPT"):
            raise Refused(400, "signal must be EOF or INTERRUPT")
        execution = self._execution(request)
        await execution.send(asked.get("text"), asked.get("signal"))
        facts = {"sandbox_id": execution.devbox_id, "operation": "send-std-in"}
        if self.ground.faults.take(FaultName.EXEC_DROPPED, "runloop", facts):
            drop(request)
            raise asyncio.CancelledError
        told = {"devbox_id": execution.devbox_id, "execution_id": execution.execution_id, "success": True}
        return web.json_response(told)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events. A chunk's offset is where the next one begins, which is where a client goes on."""
        at = query_number(request, "offset", 0, lowest=0, largest=2**53)
        execution = self._execution(request)
        printed = execution.printed[STREAMS[request.match_info["stream"]]]
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        facts = {"sandbox_id": execution.devbox_id, "operation": "stream"}
        fault = self.ground.faults.take(FaultName.EXEC_DROPPED, "runloop", facts)
        until = None if fault is None else asyncio.get_running_loop().time() + (fault.seconds or 0.0)
        while True:
            news = printed.news
            while at < printed.size:
                text, after = printed.text_from(at)
                if after == at:
                    break
                at = after
                chunk = json.dumps({"output": text, "offset": at})
                await response.write(f"data: {chunk}\n\n".encode())
            if until is not None and asyncio.get_running_loop().time() >= until:
                drop(request)
                raise asyncio.CancelledError
            if printed.over and at >= printed.size:
                break
            left = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
            try:
                async with asyncio.timeout(left):
                    await news.wait()
            except TimeoutError:
                continue
        await response.write_eof()
        return response

    # ------------------------------------------------------------ files

    async def upload_file(self, request: web.Request) -> web.Response:
        devbox = self._running(request)
        path, held, written = None, None, False
        agent = await self.devboxes.agent(devbox)
        async for part in parts_of(request):
            if part.name == "path":
                path = (await bytes_of(part)).decode("utf-8", "replace")
            elif part.name == "file" and path is not None:
                await agent.write_file(_checked(path), pieces_of(part))
                written = True
            elif part.name == "file":  # the order of the parts is the client's
                held = await bytes_of(part)
        if path is None or (held is None and not written):
            raise Refused(400, "path and file are required")
        if held is not None:
            await self.devboxes.write(devbox, _checked(path), held)
        return web.json_response({})

    async def download_file(self, request: web.Request) -> web.StreamResponse:
        asked = await json_object(request)
        check_fields(asked, {"path": TEXT}, required=("path",))
        return await self._send(request, self._running(request), asked["path"], "application/octet-stream")

    async def read_file(self, request: web.Request) -> web.StreamResponse:
        asked = await json_object(request)
        check_fields(asked, {"file_path": TEXT}, required=("file_path",))
        return await self._send(
            request, self._running(request), asked["file_path"], "text/plain; charset=utf-8"
        )

    async def _send(self, request: web.Request, devbox: Devbox, path: str, kind: str) -> web.StreamResponse:
        _, pieces = await (await self.devboxes.agent(devbox)).read_file(path)
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        try:
            async for piece in pieces:
                await response.write(piece)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        await response.write_eof()
        return response

    async def write_file(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        contents = asked.get("contents")
        check_fields(asked, {"file_path": TEXT}, required=("file_path",))
        if not isinstance(contents, str):
            raise Refused(400, "contents must be a string")
        devbox = self._running(request)
        told = {"devbox_id": devbox.devbox_id, "exit_status": 0, "stdout": "", "stderr": ""}
        try:
            await self.devboxes.write(devbox, _checked(asked["file_path"]), contents.encode())
        except AgentError as error:
            told |= {"exit_status": 1, "stderr": str(error)}
        return web.json_response(told)


def _checked(path: str) -> str:
    if not path or "\0" in path or posixpath.basename(path) in ("", ".", ".."):
        raise Refused(400, "the path must name a file")
    return path
