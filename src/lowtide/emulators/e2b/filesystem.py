"""envd's filesystem service: stat, list, move, remove, and watching by inotify."""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.e2b import connect
from lowtide.emulators.e2b.connect import RpcError, Stream
from lowtide.emulators.e2b.model import Sandbox, UnknownUser
from lowtide.emulators.fields import FLAG, TEXT, check_fields, whole
from lowtide.emulators.request_check import Malformed
from lowtide.emulators.web import drop
from lowtide.errors import LowtideError, SandboxGone

if TYPE_CHECKING:
    from lowtide.emulators.e2b import E2BEmulator

_CODES = {
    "ENOENT": "not_found",
    "missing": "not_found",
    "exists": "already_exists",
    "EEXIST": "already_exists",
    "not-a-directory": "invalid_argument",
    "is-a-directory": "invalid_argument",
    "invalid": "invalid_argument",
    "EACCES": "permission_denied",
    "EPERM": "permission_denied",
    "ELOOP": "failed_precondition",
    "ENAMETOOLONG": "invalid_argument",
    "ENOTDIR": "invalid_argument",
    "too-many": "resource_exhausted",
    "EMFILE": "resource_exhausted",
}
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "other": "FILE_TYPE_UNSPECIFIED"}


_FIELDS = {
    **dict.fromkeys(("path", "source", "destination", "watcherId"), TEXT),
    **dict.fromkeys(("recursive", "includeEntry"), FLAG),
    "depth": whole(0, 2**31 - 1),
}


class FilesystemService:
    """The methods under ``/filesystem.Filesystem/``."""

    def __init__(self, emulator: E2BEmulator) -> None:
        self.sandboxes = emulator.sandboxes_table

    async def call(self, method: str, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        if method == "WatchDir":
            return await self._watch_dir(request, sandbox)
        message = await connect.unary_message(request)
        try:
            user = connect.user_of(request) or "user"
            return connect.unary_answer(await self._answer(method, message, user, sandbox))
        except (AgentError, UnknownUser) as error:
            raise as_rpc(error) from None

    async def _answer(
        self, method: str, message: dict[str, Any], user: str, sandbox: Sandbox
    ) -> dict[str, Any]:
        check_fields(message, _FIELDS)
        agent = await self.sandboxes.agent(sandbox, user)
        path = message.get("path") or ""
        if method == "Stat":
            return {"entry": entry_info((await agent.ask("stat", path=path))[0]["entry"])}
        if method == "MakeDir":
            answer, _ = await self.sandboxes.make_directory(sandbox, user, path)
            return {"entry": entry_info(answer["entry"])}
        if method == "Move":
            source, destination = message.get("source") or "", message.get("destination") or ""
            answer, _ = await agent.ask("move", source=source, destination=destination)
            return {"entry": entry_info(answer["entry"])}
        if method == "ListDir":
            answer, _ = await agent.ask("list", path=path, depth=message.get("depth") or 1)
            return {"entries": [entry_info(one) for one in answer["entries"]]}
        if method == "Remove":
            await agent.ask("remove", path=path)
            return {}
        if method == "CreateWatcher":
            events: list[dict[str, Any]] = []
            number = await agent.watch(
                path,
                recursive=bool(message.get("recursive")),
                entry=bool(message.get("includeEntry")),
                on_events=lambda new: events.extend(_event(one) for one in new),
            )
            watcher_id = "w" + secrets.token_hex(8)
            sandbox.watchers[watcher_id] = (agent, number, events)
            return {"watcherId": watcher_id}
        if method in ("GetWatcherEvents", "RemoveWatcher"):
            watcher_id = str(message.get("watcherId"))
            if watcher_id not in sandbox.watchers:
                raise RpcError("not_found", f"watcher with id {watcher_id} not found")
            agent, number, events = sandbox.watchers[watcher_id]
            if method == "RemoveWatcher":
                del sandbox.watchers[watcher_id]
                await agent.unwatch(number)
                return {}
            await agent.flush(number)
            taken, events[:] = list(events), []
            return {"events": taken}
        raise RpcError("unimplemented", f"no method {method}")

    async def _watch_dir(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        stream = Stream(request)
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        def queue(new: list[dict[str, Any]]) -> None:
            for one in new:
                events.put_nowait(one)

        try:
            message = await connect.first_message(request)
            check_fields(message, _FIELDS)
            timeout = connect.timeout_seconds(request)
            agent = await self.sandboxes.agent(sandbox, connect.user_of(request) or "user")
            number = await agent.watch(
                str(message.get("path") or ""),
                recursive=bool(message.get("recursive")),
                entry=bool(message.get("includeEntry")),
                on_events=queue,
            )
        except (AgentError, UnknownUser, RpcError, Malformed, LowtideError) as error:
            await stream.open()
            return await stream.end(as_rpc(error))
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        keepalive = connect.keepalive_seconds(request)
        cut = asyncio.create_task(sandbox.cut.wait())
        waiting: asyncio.Task[dict[str, Any]] | None = None
        try:
            await stream.open()
            await stream.send({"start": {}})
            while True:
                waiting = waiting or asyncio.create_task(events.get())
                left = keepalive if deadline is None else max(0.0, min(keepalive, deadline - loop.time()))
                await asyncio.wait({waiting, cut}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    drop(request)
                    raise asyncio.CancelledError
                if waiting.done():
                    event, waiting = waiting.result(), None
                    await stream.send({"filesystem": _event(event)})
                elif deadline is not None and loop.time() >= deadline:
                    return await stream.end(RpcError("deadline_exceeded", "context deadline exceeded"))
                else:
                    await stream.send({"keepalive": {}})
        finally:
            cut.cancel()
            if waiting is not None:
                waiting.cancel()
            await asyncio.shield(asyncio.ensure_future(agent.unwatch(number)))


def entry_info(entry: dict[str, Any]) -> dict[str, Any]:
    """What the agent found, in envd's words."""
    seconds, nanoseconds = divmod(int(entry["modified_ns"]), 1_000_000_000)
    moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    described = {
        "name": entry["name"],
        "type": _TYPES.get(entry["kind"], "FILE_TYPE_UNSPECIFIED"),
        "path": entry["path"],
        "size": str(entry["size"]),
        "mode": entry["mode"],
        "permissions": entry["permissions"],
        "owner": entry["owner"],
        "group": entry["group"],
        "modifiedTime": f"{moment}.{nanoseconds:09d}Z",
    }
    if entry.get("target"):
        described["symlinkTarget"] = entry["target"]
    if entry.get("metadata"):
        described["metadata"] = entry["metadata"]
    return described


def as_rpc(error: Exception) -> RpcError:
    if isinstance(error, RpcError):
        return error
    if isinstance(error, UnknownUser):
        return RpcError("unauthenticated", str(error))
    if isinstance(error, Malformed):
        return RpcError("invalid_argument", str(error))
    if isinstance(error, AgentError):
        return RpcError(_CODES.get(error.kind, "internal"), str(error))
    return RpcError("unavailable" if isinstance(error, SandboxGone) else "internal", str(error))


def _event(event: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"name": str(event.get("name")), "type": f"EVENT_TYPE_{event.get('type')}"}
    if "entry" in event:
        described["entry"] = entry_info(event["entry"])
    return described
