"""The stateful interpreter: one Python process per context, its variables kept from run to run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from lowtide.emulators.daytona.answers import Refused, body_of, rfc3339, strings_of, whole_of
from lowtide.emulators.daytona.sandbox import Sandbox
from lowtide.emulators.request_check import parse_json
from lowtide.emulators.web import drop
from lowtide.errors import LowtideError
from lowtide.providers.base import STDOUT, ProcessHandle

if TYPE_CHECKING:
    from lowtide.emulators.daytona.machine import Machine
    from lowtide.emulators.daytona.toolbox import Toolbox

_DEFAULT = "default"
_TIMED_OUT = 4008
_DEFAULT_TIMEOUT_SECONDS = 600
_GRACE_SECONDS = 2.0
_LONGEST_LINE = 4 << 20
"""Of what the worker tells: it tells long texts in pieces (`worker.PIECE`)."""


@cache
def _source() -> str:
    return Path(__file__).with_name("worker.py").read_text()


class Context:
    """One interpreter. Its process is started when it is first used, and again after it died."""

    def __init__(self, context_id: str, cwd: str, now: float) -> None:
        self.context_id = context_id
        self.cwd = cwd
        self.created_at = now
        self.lock = asyncio.Lock()
        self._handle: ProcessHandle | None = None
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(256)
        self._pump: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        return self._pump is not None and not self._pump.done()

    async def run(
        self, machine: Machine, sandbox: Sandbox, code: str, environment: dict[str, str]
    ) -> AsyncIterator[dict[str, Any]]:
        """What it prints and how it fails, until it is done. The caller holds the lock."""
        if not self.active:
            await self.aclose()
            self._lines = asyncio.Queue(256)
            self._handle = await machine.start(
                sandbox, ("python3", "-c", _source()), cwd=self.cwd, stdin=True
            )
            self._pump = asyncio.create_task(self._read(self._handle, self._lines))
        assert self._handle is not None
        asked = json.dumps({"code": code, "envs": environment}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            await self._handle.write_stdin(asked)
        while True:
            said = await self._lines.get()
            if said is None:
                value = "the interpreter's process has ended; its variables are gone"
                yield {"type": "error", "name": "RuntimeError", "value": value, "traceback": ""}
                return
            if said.get("type") == "done":
                return
            yield said

    async def interrupt(self) -> None:
        """Ctrl+C, and what does not heed it is ended."""
        if self._handle is None or not self.active:
            return
        with contextlib.suppress(LowtideError):
            await self._handle.signal(signal.SIGINT)
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                while (said := await self._lines.get()) is not None and said.get("type") != "done":
                    pass
        except TimeoutError:
            with contextlib.suppress(LowtideError):
                await self._handle.terminate(0.0)
            await self.aclose()

    async def _read(self, handle: ProcessHandle, lines: asyncio.Queue[dict[str, Any] | None]) -> None:
        buffer = bytearray()
        try:
            async for stream, data in handle.output():
                if stream != STDOUT:
                    continue
                *whole, rest = data.split(b"\n")
                if whole:
                    whole[0] = bytes(buffer) + whole[0]
                    buffer.clear()
                buffer += rest
                if max(len(buffer), *map(len, whole), 0) > _LONGEST_LINE:
                    with contextlib.suppress(LowtideError):
                        await handle.terminate(0.0)
                    return  # the worker's own lines are short: code has written to its stream
                for line in whole:
                    with contextlib.suppress(ValueError, RecursionError):
                        said = json.loads(line)
                        if isinstance(said, dict):
                            await lines.put(said)
        except LowtideError:
            pass
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                lines.put_nowait(None)

    async def aclose(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        if self._handle is not None:
            handle, self._handle = self._handle, None
            await handle.aclose()

    def described(self) -> dict[str, Any]:
        return {
            "id": self.context_id,
            "cwd": self.cwd,
            "createdAt": rfc3339(self.created_at),
            "active": True,
            "language": "python",
        }


class Interpreters:
    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.machine = toolbox.sandboxes.machine

    def add_calls(self, add: Callable[..., None]) -> None:
        add("GET", "/process/interpreter/context", self.list_contexts)
        add("POST", "/process/interpreter/context", self.create_context)
        add("DELETE", "/process/interpreter/context/{context}", self.delete_context)
        add("GET", "/process/interpreter/execute", self.interpret)

    def _room(self, sandbox: Sandbox) -> dict[str, Context]:
        room: dict[str, Context] | None = sandbox.rooms.get("contexts")
        if room is None:
            now = self.toolbox.ground.clock.now()
            room = {_DEFAULT: Context(_DEFAULT, self.machine.home(sandbox), now)}
            sandbox.rooms["contexts"] = room
            sandbox.closing.append(lambda: _close_all(room))
        return room

    async def list_contexts(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        shown = [one.described() for name, one in self._room(sandbox).items() if name != _DEFAULT]
        return web.json_response({"contexts": shown})

    async def create_context(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        if body.get("language") not in (None, "", "python"):
            raise Refused(400, f"unsupported language: {body['language']}")
        where = await self.machine.directory(sandbox, body.get("cwd"))
        made = Context(str(uuid.uuid4()), where, self.toolbox.ground.clock.now())
        self._room(sandbox)[made.context_id] = made
        return web.json_response(made.described())

    async def delete_context(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        name = request.match_info["context"]
        if name == _DEFAULT:
            raise Refused(400, "the default context cannot be deleted")
        context = self._room(sandbox).pop(name, None)
        if context is None:
            raise Refused(404, f"context {name} not found", code="NOT_FOUND")
        await context.aclose()
        return web.json_response({"message": "context deleted"})

    async def interpret(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=64 << 20)
        await socket.prepare(request)
        message = await socket.receive()
        if message.type is not WSMsgType.TEXT:
            await socket.close(code=1008, message=b"the request is missing")
            return socket
        try:
            asked = parse_json(message.data.encode())
            code, variables = asked["code"], strings_of(asked.get("envs"), "envs")
            timeout = whole_of(asked.get("timeout"), "timeout")
            context = self._room(sandbox)[asked.get("contextId") or _DEFAULT]
        except (ValueError, KeyError, TypeError, Refused) as error:
            await socket.close(code=1008, message=f"the request cannot be read: {error}".encode()[:120])
            return socket
        seconds = _DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout or None
        running = asyncio.ensure_future(self._run(socket, sandbox, context, str(code), variables))
        leaving = asyncio.ensure_future(_until_closed(socket))
        cut = asyncio.ensure_future(sandbox.cut.wait())
        try:
            await asyncio.wait({running, leaving, cut}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                leaving.cancel()
                await socket.close(code=1000)
            elif cut.done():
                drop(request)
            else:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
                if not leaving.done():
                    leaving.cancel()
                    await socket.close(code=_TIMED_OUT, message=b"execution timed out")
        except ConnectionError:
            pass
        finally:
            for task in (running, leaving, cut):
                task.cancel()
        return socket

    async def _run(
        self,
        socket: web.WebSocketResponse,
        sandbox: Sandbox,
        context: Context,
        code: str,
        environment: dict[str, str],
    ) -> None:
        async with context.lock:
            done = False
            try:
                async for said in context.run(self.machine, sandbox, code, environment):
                    await socket.send_str(json.dumps(said))
                done = True
            finally:
                if not done:  # the next run must not wait behind this one
                    await asyncio.shield(asyncio.ensure_future(context.interrupt()))


async def _until_closed(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        pass


async def _close_all(room: dict[str, Context]) -> None:
    contexts = list(room.values())
    room.clear()
    await asyncio.gather(*(context.aclose() for context in contexts), return_exceptions=True)
