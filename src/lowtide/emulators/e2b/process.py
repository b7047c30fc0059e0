"""envd's process service: commands and terminals in the sandbox, joined and left at will."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.e2b import connect
from lowtide.emulators.e2b.connect import RpcError, Stream
from lowtide.emulators.e2b.guest_process import SIGNALS, GuestProcess
from lowtide.emulators.e2b.model import Sandbox, UnknownUser
from lowtide.emulators.faults import FaultName
from lowtide.emulators.fields import FLAG, LIST_OF_TEXT, OBJECT, TEXT, TEXTS, check_fields, whole
from lowtide.emulators.guest import UNTIL_SETTLED
from lowtide.emulators.request_check import Malformed
from lowtide.emulators.web import drop
from lowtide.errors import LowtideError, SandboxGone
from lowtide.providers.base import TerminalSize

if TYPE_CHECKING:
    from lowtide.emulators.e2b import E2BEmulator

# The seam does not say which pid a command has inside; a shell that becomes the command does.
_WITH_PID = 'echo "$$"; exec "$@"'
_WHEN_SETTLED = f"{UNTIL_SETTLED}; {_WITH_PID}"
_REMEMBERED = 1000


_COMMAND = {"cmd": TEXT, "args": LIST_OF_TEXT, "envs": TEXTS, "cwd": TEXT}


class ProcessService:
    """The methods under ``/process.Process/``."""

    def __init__(self, emulator: E2BEmulator) -> None:
        self.emulator = emulator
        self.sandboxes = emulator.sandboxes_table
        self.ground = emulator.ground
        self._ended: OrderedDict[tuple[str, int], GuestProcess] = OrderedDict()

    async def call(self, method: str, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        if method == "Start":
            return await self._start(request, sandbox)
        if method == "Connect":
            return await self._connect(request, sandbox)
        if method == "StreamInput":
            return await self._stream_input(request, sandbox)
        message = await connect.unary_message(request)
        if method == "List":
            listed = [
                {"config": p.config, "pid": pid, **({"tag": p.tag} if p.tag else {})}
                for pid, p in sandbox.processes.items()
            ]
            return connect.unary_answer({"processes": listed})
        process = self._selected(sandbox, message.get("process"))
        if method == "SendInput":
            await self._input(process, message.get("input"))
        elif method == "CloseStdin":
            if process.tty:
                raise RpcError("invalid_argument", "tty has no stdin to close")
            await process.handle.close_stdin()
        elif method == "SendSignal":
            name = SIGNALS.get(str(message.get("signal")))
            if name is None:
                raise RpcError("invalid_argument", f"invalid signal: {message.get('signal')}")
            await self._signal(sandbox, process, name[0])
        elif method == "Update":
            check_fields(message, {"pty": OBJECT})
            size = (message.get("pty") or {}).get("size")
            if size is not None:
                if not process.tty:
                    raise RpcError("failed_precondition", "tty not assigned to process")
                await process.handle.resize(_size(size))
        else:
            raise RpcError("unimplemented", f"no method {method}")
        return connect.unary_answer({})

    async def _start(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        stream = Stream(request)
        try:
            message = await connect.first_message(request)
            timeout = connect.timeout_seconds(request)
            process = await self._launch(request, sandbox, message)
            listening = process.listen()
            pid = await process.started()
        except (RpcError, Malformed, LowtideError, UnknownUser) as error:
            await stream.open()
            return await stream.end(_as_rpc(error))
        sandbox.settled = True
        if process.end is None:
            sandbox.processes[pid] = process
        if timeout is not None:
            # The process has that long, whether or not anybody still listens; its children are not told.
            loop = asyncio.get_running_loop()
            process.timer = loop.call_later(timeout, lambda: self._time_out(sandbox, process))
        facts = {**sandbox.metadata, "sandbox_id": sandbox.sandbox_id}
        if fault := self.ground.faults.take(FaultName.GONE_MID_COMMAND, "e2b", facts):
            loop = asyncio.get_running_loop()
            loop.call_later(fault.seconds or 0.5, lambda: self._vanish(sandbox))
        self._drop_later(request, sandbox, process, "start")
        await stream.open()
        await stream.send({"event": {"start": {"pid": pid}}})
        return await self._follow(request, sandbox, process, listening, stream, timeout)

    async def _connect(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        stream = Stream(request)
        try:
            message = await connect.first_message(request)
            process = self._selected(sandbox, message.get("process"), ended=True)
            timeout = connect.timeout_seconds(request)
        except RpcError as error:
            await stream.open()
            return await stream.end(error)
        await stream.open()
        listening = process.listen()
        if process.end is not None:
            listening.put_nowait(None)
        self._drop_later(request, sandbox, process, "connect")
        await stream.send({"event": {"start": {"pid": process.pid}}})
        return await self._follow(request, sandbox, process, listening, stream, timeout)

    async def _follow(
        self,
        request: web.Request,
        sandbox: Sandbox,
        process: GuestProcess,
        listening: asyncio.Queue[dict[str, Any] | None],
        stream: Stream,
        timeout: float | None,
    ) -> web.StreamResponse:
        """Pass events on until the process ends, the time is over, or the sandbox is gone."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        keepalive = connect.keepalive_seconds(request)
        cut = asyncio.create_task(sandbox.cut.wait())
        waiting: asyncio.Task[dict[str, Any] | None] | None = None
        try:
            while True:
                waiting = waiting or asyncio.create_task(listening.get())
                left = keepalive if deadline is None else max(0.0, min(keepalive, deadline - loop.time()))
                await asyncio.wait({waiting, cut}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    drop(request)
                    raise asyncio.CancelledError
                if waiting.done():
                    events, waiting = [waiting.result()], None
                    while not listening.empty():
                        events.append(listening.get_nowait())
                    known = [event for event in events if event is not None]
                    if len(known) < len(events):
                        await stream.send(*known, {"event": {"end": process.end or {"exitCode": -1}}})
                        return await stream.end()
                    await stream.send(*known)
                elif deadline is not None and loop.time() >= deadline:
                    return await stream.end(RpcError("deadline_exceeded", "context deadline exceeded"))
                else:
                    await stream.send({"event": {"keepalive": {}}})
        finally:
            cut.cancel()
            if waiting is not None:
                waiting.cancel()
            process.leave(listening)

    async def _launch(self, request: web.Request, sandbox: Sandbox, message: dict[str, Any]) -> GuestProcess:
        check_fields(
            message, {"process": OBJECT, "pty": OBJECT, "tag": TEXT, "stdin": FLAG}, required=("process",)
        )
        config = message["process"]
        check_fields(config, _COMMAND, required=("cmd",))
        user = connect.user_of(request) or "user"
        home = await self.sandboxes.home(sandbox, user)
        cwd = posixpath.join(home, config["cwd"]) if config.get("cwd") else home
        if cwd != home:
            agent = await self.sandboxes.agent(sandbox, user)
            try:
                await agent.ask("stat", path=cwd)
            except AgentError as error:
                if error.kind == "ENOENT":
                    raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist") from None
        pty = message.get("pty")
        environment = {
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "E2B_SANDBOX": "true",
            "E2B_SANDBOX_ID": sandbox.sandbox_id,
            **sandbox.environment,
            **{str(k): str(v) for k, v in (config.get("envs") or {}).items()},
        }
        # The sandbox's first process may still be setting things up when the first command comes.
        script = _WITH_PID if sandbox.settled else _WHEN_SETTLED
        argv = ("/bin/sh", "-c", script, "sh", str(config["cmd"]), *map(str, config.get("args") or ()))
        handle = await self.ground.backing.start(
            sandbox.backing,
            argv,
            user=self.sandboxes.account(user),
            cwd=cwd,
            environment=environment,
            stdin=bool(message.get("stdin", True)) or pty is not None,
            tty=_size(pty.get("size") or {}) if pty is not None else None,
        )
        process = GuestProcess(handle, config, message.get("tag"), user, pty is not None)
        process.on_end = lambda ended: self._remember(sandbox, ended)
        return process

    def _remember(self, sandbox: Sandbox, process: GuestProcess) -> None:
        if sandbox.processes.get(process.pid) is process:
            del sandbox.processes[process.pid]
        self._ended[(sandbox.sandbox_id, process.pid)] = process
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _selected(self, sandbox: Sandbox, selector: Any, *, ended: bool = False) -> GuestProcess:
        selector = selector if isinstance(selector, dict) else {}
        if "tag" in selector:
            for process in sandbox.processes.values():
                if process.tag == selector["tag"]:
                    return process
            raise RpcError("not_found", f"process with tag {selector['tag']} not found")
        pid = selector.get("pid", 0)
        if type(pid) is not int:
            raise RpcError("invalid_argument", "pid must be a whole number")
        found = sandbox.processes.get(pid)
        if found is None and ended:
            found = self._ended.get((sandbox.sandbox_id, pid))
        if found is None:
            raise RpcError("not_found", f"process with pid {pid} not found")
        return found

    async def _input(self, process: GuestProcess, given: Any) -> None:
        given = given if isinstance(given, dict) else {}
        if ("pty" in given) != process.tty:
            raise RpcError("failed_precondition", "tty and stdin do not mix")
        try:
            await process.handle.write_stdin(connect.decoded(given.get("pty" if process.tty else "stdin")))
        except BrokenPipeError:
            raise RpcError("internal", "error writing to stdin: broken pipe") from None

    async def _stream_input(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        stream = Stream(request)
        process: GuestProcess | None = None
        try:
            async for message in connect.messages(request):
                if "start" in message:
                    check_fields(message, {"start": OBJECT, "data": OBJECT})
                    process = self._selected(sandbox, message["start"].get("process"))
                elif "data" in message:
                    if process is None:
                        raise RpcError("invalid_argument", "data before start")
                    check_fields(message, {"data": OBJECT})
                    await self._input(process, message["data"].get("input"))
        except (RpcError, Malformed) as error:
            await stream.open()
            return await stream.end(_as_rpc(error))
        await stream.open()
        await stream.send({})
        return await stream.end()

    async def _signal(self, sandbox: Sandbox, process: GuestProcess, name: str) -> None:
        """To that one process, as the service does: what it started is not told."""
        process.signalled.add(name)
        user = self.sandboxes.account(process.user)
        await self.ground.backing.run(
            sandbox.backing, ("/bin/sh", "-c", f"kill -{name} {process.pid}"), user=user
        )
        if name == "KILL":
            with contextlib.suppress(LowtideError, TimeoutError):
                async with asyncio.timeout(5):
                    await process.handle.wait()

    def _time_out(self, sandbox: Sandbox, process: GuestProcess) -> None:
        if process.end is None and not sandbox.cut.is_set():
            self.emulator.background(self._signal(sandbox, process, "KILL"))

    def _drop_later(
        self, request: web.Request, sandbox: Sandbox, process: GuestProcess, operation: str
    ) -> None:
        facts = {**sandbox.metadata, "sandbox_id": sandbox.sandbox_id, "user": process.user}
        fault = self.ground.faults.take(FaultName.EXEC_DROPPED, "e2b", {**facts, "operation": operation})
        if fault is not None:
            asyncio.get_running_loop().call_later(fault.seconds or 0.0, drop, request)

    def _vanish(self, sandbox: Sandbox) -> None:
        if sandbox.sandbox_id in self.sandboxes.table:
            self.emulator.background(self.sandboxes.kill(sandbox.sandbox_id))


def _size(size: Any) -> TerminalSize:
    if not isinstance(size, dict):
        raise RpcError("invalid_argument", "size must be an object")
    check_fields(size, {"cols": whole(0, 1000), "rows": whole(0, 1000)})
    return TerminalSize(columns=size.get("cols") or 80, rows=size.get("rows") or 24)


def _as_rpc(error: Exception) -> RpcError:
    if isinstance(error, RpcError):
        return error
    if isinstance(error, UnknownUser):
        return RpcError("unauthenticated", str(error))
    if isinstance(error, Malformed):
        return RpcError("invalid_argument", str(error))
    return RpcError("unavailable" if isinstance(error, SandboxGone) else "internal", str(error))
