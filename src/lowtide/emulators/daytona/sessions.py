"""Sessions: a shell that stays, and the commands that are run in it one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import WSCloseCode, web

from lowtide.emulators.daytona.answers import Refused, body_of, text_of
from lowtide.emulators.daytona.commands import hang_up
from lowtide.emulators.daytona.sandbox import Sandbox
from lowtide.emulators.daytona.shell import Command, Shell
from lowtide.emulators.faults import FaultName
from lowtide.emulators.web import drop
from lowtide.providers.base import STDERR

if TYPE_CHECKING:
    from lowtide.emulators.daytona.toolbox import Toolbox

_PREFIX = {1: b"\x01\x01\x01", STDERR: b"\x02\x02\x02"}
_ENTRYPOINT = "entrypoint"


class Sessions:
    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.machine = toolbox.sandboxes.machine

    def add_calls(self, add: Callable[..., None]) -> None:
        add("GET", "/process/session", self.list_sessions)
        add("POST", "/process/session", self.create_session)
        add("GET", "/process/session/entrypoint", self.entrypoint)
        add("GET", "/process/session/entrypoint/logs", self.entrypoint_logs)
        one = "/process/session/{session}"
        add("GET", one, self.get_session)
        add("DELETE", one, self.delete_session)
        add("POST", f"{one}/exec", self.session_exec)
        add("GET", f"{one}/command/{{command}}", self.get_command)
        add("GET", f"{one}/command/{{command}}/logs", self.command_logs)
        add("POST", f"{one}/command/{{command}}/input", self.command_input)

    def _room(self, sandbox: Sandbox) -> dict[str, Shell]:
        room: dict[str, Shell] | None = sandbox.rooms.get("sessions")
        if room is None:
            room = sandbox.rooms["sessions"] = {}
            sandbox.closing.append(lambda: _close_all(room))
        return room

    def _session(self, request: web.Request, sandbox: Sandbox) -> Shell:
        name = request.match_info["session"]
        shell = self._room(sandbox).get(name)
        if shell is None:
            raise Refused(404, f"session not found: {name}", code="PROCESS_NOT_FOUND")
        return shell

    def _command(self, request: web.Request, sandbox: Sandbox) -> tuple[Shell, Command]:
        shell = self._session(request, sandbox)
        command = shell.commands.get(request.match_info["command"])
        if command is None:
            raise Refused(
                404, f"command not found: {request.match_info['command']}", code="PROCESS_NOT_FOUND"
            )
        return shell, command

    async def create_session(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        name = text_of(await body_of(request), "sessionId")
        room = self._room(sandbox)
        if name in room:
            raise Refused(409, f"session already exists: {name}", code="CONFLICT")
        shell = room[name] = Shell(name)
        try:
            await shell.start(self.machine, sandbox)
        except BaseException:
            room.pop(name, None)
            raise
        return web.Response(status=201)

    async def list_sessions(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response([_described(shell) for shell in self._room(sandbox).values()])

    async def get_session(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response(_described(self._session(request, sandbox)))

    async def delete_session(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        shell = self._session(request, sandbox)
        self._room(sandbox).pop(shell.name, None)
        await shell.end()
        return web.Response(status=204)

    async def session_exec(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        body = await body_of(request)
        shell = self._session(request, sandbox)
        text = text_of(body, "command")
        later = bool(body.get("runAsync") or body.get("async"))
        command = await shell.run(text, interactive=later, echo=not body.get("suppressInputEcho"))
        facts = {**sandbox.facts, "operation": "session-exec"}
        faults = self.toolbox.ground.faults
        if fault := faults.take(FaultName.GONE_MID_COMMAND, "daytona", facts):
            self.toolbox.vanish(sandbox, fault.seconds or 0.5)
        if fault := faults.take(FaultName.EXEC_DROPPED, "daytona", facts):
            await asyncio.sleep(fault.seconds or 0.0)
            hang_up(request)
            raise asyncio.CancelledError
        if later:
            return web.json_response({"cmdId": command.command_id}, status=202)
        await _either(command.ended.wait(), sandbox.cut.wait())
        if not command.ended.is_set():
            raise Refused(502, "the sandbox has ended")
        logs = command.log.texts()
        return web.json_response({"cmdId": command.command_id, "exitCode": command.exit_code, **logs})

    async def get_command(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response(_command(self._command(request, sandbox)[1]))

    async def command_input(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        shell, command = self._command(request, sandbox)
        data = (await body_of(request)).get("data")
        if not isinstance(data, str):
            raise Refused(400, "data is required", code="INVALID_REQUEST_BODY")
        if command.ended.is_set():
            raise Refused(410, "command has already completed", code="COMMAND_ALREADY_COMPLETED")
        await shell.send_input(self.machine, sandbox, command, data.encode())
        return web.Response(status=204)

    async def command_logs(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        _, command = self._command(request, sandbox)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return web.json_response(command.log.texts())
        return await self._follow(request, sandbox, command)

    async def _follow(self, request: web.Request, sandbox: Sandbox, command: Command) -> web.StreamResponse:
        """From the first byte to the last, each frame marked with its stream."""
        socket = web.WebSocketResponse(heartbeat=None, compress=False)
        await socket.prepare(request)
        reading = asyncio.ensure_future(_until_closed(socket))
        at = 0
        try:
            while not socket.closed:
                at = max(at, command.log.first_piece)  # of a slow reader's, some may be kept no more
                while (piece := command.log.piece(at)) is not None:
                    stream, data = piece
                    await socket.send_bytes(_PREFIX[stream] + data)
                    at = max(at + 1, command.log.first_piece)
                if command.ended.is_set() and command.log.piece(at) is None:
                    await socket.close(code=WSCloseCode.OK)
                    return socket
                news = command.log.news
                await _either(news.wait(), command.ended.wait(), sandbox.cut.wait(), reading)
                if sandbox.cut.is_set() and not command.ended.is_set():
                    drop(request)
                    break
                if reading.done():
                    break
        except ConnectionResetError:
            pass
        finally:
            reading.cancel()
        return socket

    # The sandbox's own first process: here it is the emulator's and says nothing.

    async def entrypoint(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response({"sessionId": _ENTRYPOINT, "commands": []})

    async def entrypoint_logs(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.close(code=WSCloseCode.OK)
            return socket
        return web.json_response({"output": "", "stdout": "", "stderr": ""})


def _described(shell: Shell) -> dict[str, Any]:
    return {
        "sessionId": shell.name,
        "commands": [_command(command) for command in shell.commands.values()],
    }


def _command(command: Command) -> dict[str, Any]:
    described: dict[str, Any] = {"id": command.command_id, "command": command.text}
    if command.exit_code is not None:
        described["exitCode"] = command.exit_code
    return described


async def _close_all(room: dict[str, Shell]) -> None:
    shells = list(room.values())
    room.clear()
    await asyncio.gather(*(shell.aclose() for shell in shells), return_exceptions=True)


async def _until_closed(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        pass


async def _either(*waiting: Any) -> None:
    """Wait for the first of them."""
    tasks = [one if isinstance(one, asyncio.Future) else asyncio.ensure_future(one) for one in waiting]
    mine = [task for task, one in zip(tasks, waiting, strict=True) if task is not one]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in mine:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
