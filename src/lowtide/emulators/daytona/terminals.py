"""Terminals: a shell on a PTY, joined and left over WebSockets."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from lowtide.emulators.daytona.answers import Refused, body_of, rfc3339, strings_of, whole_of
from lowtide.emulators.daytona.sandbox import Sandbox
from lowtide.emulators.faults import Fault, FaultName
from lowtide.emulators.request_check import parse_json, whole_number
from lowtide.emulators.web import drop
from lowtide.errors import LowtideError
from lowtide.providers.base import ProcessHandle, TerminalSize

if TYPE_CHECKING:
    from lowtide.emulators.daytona.toolbox import Toolbox

_EXIT_CONTROL = "X-Daytona-Pty-Exit-Control"
_VARIABLES = "X-Daytona-Pty-Envs~"
_UNSEEN_BYTES = 256 * 1024


class Terminal:
    """One shell. What it prints goes to all who are connected; before the first one it is kept."""

    def __init__(
        self, name: str, cwd: str, environment: dict[str, str], size: TerminalSize, now: float
    ) -> None:
        self.name = name
        self.cwd = cwd
        self.environment = environment
        self.size = size
        self.created_at = now
        self.exit_code: int | None = None
        self.killed = False
        self.ended = asyncio.Event()
        self.handle: ProcessHandle | None = None
        self._clients: set[web.WebSocketResponse] = set()
        self._unseen = bytearray()
        self._printed = 0
        self._waiting: list[tuple[int, asyncio.Event]] = []
        self._pump: asyncio.Task[None] | None = None

    def begin(self, handle: ProcessHandle) -> None:
        self.handle = handle
        self._pump = asyncio.create_task(self._run(handle))

    async def join(self, socket: web.WebSocketResponse) -> None:
        unseen, self._unseen = bytes(self._unseen), bytearray()
        if unseen:
            await socket.send_bytes(unseen)
        self._clients.add(socket)

    def leave(self, socket: web.WebSocketResponse) -> None:
        self._clients.discard(socket)

    async def _run(self, handle: ProcessHandle) -> None:
        try:
            async for _, data in handle.output():
                if not self._clients:
                    self._unseen += data
                    del self._unseen[:-_UNSEEN_BYTES]
                for client in list(self._clients):
                    with contextlib.suppress(ConnectionError, RuntimeError):
                        await client.send_bytes(data)
                self._printed += len(data)
                for after, reached in self._waiting:
                    if self._printed >= after:
                        reached.set()
            self.exit_code = await handle.wait()
        except LowtideError:
            self.exit_code = -1
        self.ended.set()

    async def printed(self, more: int) -> None:
        """Wait until it has printed so much more."""
        waiting = (self._printed + more, asyncio.Event())
        self._waiting.append(waiting)
        try:
            await waiting[1].wait()
        finally:
            self._waiting.remove(waiting)

    async def kill(self) -> None:
        self.killed = True
        if self.handle is not None:
            with contextlib.suppress(LowtideError):
                await self.handle.terminate(0.0)

    async def aclose(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        if self.handle is not None:
            await self.handle.aclose()

    def described(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "cwd": self.cwd,
            "envs": self.environment,
            "cols": self.size.columns,
            "rows": self.size.rows,
            "createdAt": rfc3339(self.created_at),
            "active": self.handle is not None and not self.ended.is_set(),
            "lazyStart": False,
        }


class Terminals:
    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.machine = toolbox.sandboxes.machine

    def add_calls(self, add: Callable[..., None]) -> None:
        add("GET", "/process/pty", self.list_terminals)
        add("POST", "/process/pty", self.create_terminal)
        add("GET", "/process/pty/create-connect", self.create_and_connect)
        add("GET", "/process/pty/{session}", self.get_terminal)
        add("DELETE", "/process/pty/{session}", self.kill_terminal)
        add("GET", "/process/pty/{session}/connect", self.connect)
        add("POST", "/process/pty/{session}/resize", self.resize)

    def _room(self, sandbox: Sandbox) -> dict[str, Terminal]:
        room: dict[str, Terminal] | None = sandbox.rooms.get("terminals")
        if room is None:
            room = sandbox.rooms["terminals"] = {}
            sandbox.closing.append(lambda: _close_all(room))
        return room

    def _terminal(self, request: web.Request, sandbox: Sandbox) -> Terminal:
        name = request.match_info["session"]
        found = self._room(sandbox).get(name)
        if found is None:
            raise Refused(404, f"PTY session {name} not found", code="PROCESS_NOT_FOUND")
        return found

    async def _make(
        self, sandbox: Sandbox, name: str, cwd: str | None, environment: dict[str, str], size: TerminalSize
    ) -> Terminal:
        room = self._room(sandbox)
        before = room.get(name)
        if before is not None and not before.ended.is_set():
            raise Refused(409, f"PTY session with id {name} already exists", code="CONFLICT")
        where = await self.machine.directory(sandbox, cwd)
        terminal = room[name] = Terminal(name, where, environment, size, self.toolbox.ground.clock.now())
        try:
            handle = await self.machine.start(
                sandbox,
                ("/bin/bash",),
                cwd=where,
                environment={"TERM": "xterm-256color", **environment},
                stdin=True,
                tty=size,
            )
        except BaseException:
            room.pop(name, None)
            raise
        terminal.begin(handle)
        return terminal

    async def list_terminals(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response({"sessions": [t.described() for t in self._room(sandbox).values()]})

    async def create_terminal(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        name = str(body.get("id") or uuid.uuid4())
        variables = strings_of(body.get("envs"), "envs")
        size = _size(body.get("cols"), body.get("rows"))
        await self._make(sandbox, name, body.get("cwd"), variables, size)
        return web.json_response({"sessionId": name}, status=201)

    async def get_terminal(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response(self._terminal(request, sandbox).described())

    async def kill_terminal(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        terminal = self._terminal(request, sandbox)
        self._room(sandbox).pop(terminal.name, None)
        await terminal.kill()
        return web.json_response({"message": "PTY session deleted"})

    async def resize(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        terminal = self._terminal(request, sandbox)
        body = await body_of(request)
        if body.get("cols") is None or body.get("rows") is None:
            raise Refused(400, "cols and rows are required", code="INVALID_REQUEST_BODY")
        terminal.size = _size(body["cols"], body["rows"])
        if terminal.ended.is_set() or terminal.handle is None:
            raise Refused(410, f"PTY session {terminal.name} has ended", code="GONE")
        await terminal.handle.resize(terminal.size)
        return web.json_response(terminal.described())

    async def create_and_connect(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        query = request.query
        size = _size(_number(query.get("cols")), _number(query.get("rows")))
        name = query.get("id") or str(uuid.uuid4())
        terminal = await self._make(sandbox, name, query.get("cwd"), _variables(request), size)
        return await self._serve(request, sandbox, terminal)

    async def connect(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        terminal = self._terminal(request, sandbox)
        if terminal.ended.is_set():
            raise Refused(410, f"PTY session {terminal.name} has ended", code="GONE")
        return await self._serve(request, sandbox, terminal)

    async def _serve(self, request: web.Request, sandbox: Sandbox, terminal: Terminal) -> web.StreamResponse:
        wants_exit = _EXIT_CONTROL in _offered(request)
        socket = web.WebSocketResponse(protocols=(_EXIT_CONTROL,) if wants_exit else ())
        await socket.prepare(request)
        assert terminal.handle is not None
        await socket.send_str(json.dumps({"type": "control", "status": "connected"}))
        await terminal.join(socket)
        ended = asyncio.ensure_future(terminal.ended.wait())
        cut = asyncio.ensure_future(self._cut(sandbox, terminal))
        typing = asyncio.ensure_future(self._type(socket, terminal.handle))
        try:
            await asyncio.wait({ended, cut, typing}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                said: dict[str, Any] = {"exitCode": terminal.exit_code}
                if terminal.killed:
                    said["exitReason"] = "killed"
                if wants_exit:
                    await socket.send_str(json.dumps({"type": "control", "status": "exited", **said}))
                typing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await typing
                await socket.close(code=1000, message=json.dumps(said).encode())
            elif cut.done():
                drop(request)
        except ConnectionError:
            pass
        finally:
            terminal.leave(socket)
            for task in (ended, cut, typing):
                task.cancel()
        return socket

    async def _cut(self, sandbox: Sandbox, terminal: Terminal) -> None:
        """Until the connection is to break: the sandbox has gone, or somebody asked for a bad day."""
        facts, faults = {**sandbox.facts, "operation": "terminal"}, self.toolbox.ground.faults
        if fault := faults.take(FaultName.GONE_MID_COMMAND, "daytona", facts):
            self.toolbox.vanish(sandbox, fault.seconds or 0.5)
        if fault := faults.take(FaultName.EXEC_DROPPED, "daytona", facts):
            await _dropped(fault, terminal)
        else:
            await sandbox.cut.wait()

    async def _type(self, socket: web.WebSocketResponse, handle: ProcessHandle) -> None:
        async for message in socket:
            if message.type is WSMsgType.BINARY or message.type is WSMsgType.TEXT:
                data = message.data.encode() if isinstance(message.data, str) else message.data
                try:
                    await handle.write_stdin(data)
                except BrokenPipeError:
                    return


async def _dropped(fault: Fault, terminal: Terminal) -> None:
    if fault.after_bytes is not None:
        await terminal.printed(fault.after_bytes)
    await asyncio.sleep(fault.seconds or 0.0)


async def _close_all(room: dict[str, Terminal]) -> None:
    terminals = list(room.values())
    room.clear()
    await asyncio.gather(*(terminal.aclose() for terminal in terminals), return_exceptions=True)


def _offered(request: web.Request) -> list[str]:
    return [word.strip() for word in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]


def _variables(request: web.Request) -> dict[str, str]:
    """They travel as the name of a protocol, so that no log of addresses shows them."""
    for word in _offered(request):
        if word.startswith(_VARIABLES):
            text = word.removeprefix(_VARIABLES)
            try:
                return strings_of(parse_json(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))), "envs")
            except (binascii.Error, ValueError):
                raise Refused(400, "the environment is not readable") from None
    return {}


def _number(text: str | None) -> int | None:
    return whole_number(text) if text else None


def _size(columns: Any, rows: Any) -> TerminalSize:
    wide, high = whole_of(columns, "cols", lowest=1) or 80, whole_of(rows, "rows", lowest=1) or 24
    if wide > 1000 or high > 1000:
        raise Refused(400, "a terminal has at most 1000 columns and rows")
    return TerminalSize(columns=wide, rows=high)
