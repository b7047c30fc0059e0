"""The daemon's file calls: listing, moving, transfer in bulk and by signed URL, searching and replacing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import posixpath
import re
import secrets
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aiohttp import web

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.daytona.answers import Refused, body_of, daemon_envelope, number_in, text_of
from lowtide.emulators.daytona.sandbox import Sandbox
from lowtide.emulators.multipart import bytes_of, parts_of, pieces_of

if TYPE_CHECKING:
    from lowtide.emulators.daytona.toolbox import Toolbox

_FIELD = re.compile(r"files\[(\d+)\]\.(path|file)")
_SIGNED = {("GET", "/files/download"), ("POST", "/files/upload-v2"), ("POST", "/files/upload")}


@cache
def _search_source() -> str:
    return Path(__file__).with_name("inside.py").read_text()


class Files:
    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.machine = toolbox.sandboxes.machine

    def add_calls(self, add: Callable[..., None]) -> None:
        add("GET", "/files", self.list_files)
        add("GET", "/files/", self.list_files)
        add("DELETE", "/files", self.delete_file)
        add("DELETE", "/files/", self.delete_file)
        add("GET", "/files/info", self.file_info)
        add("POST", "/files/folder", self.create_folder)
        add("POST", "/files/move", self.move_file)
        add("POST", "/files/permissions", self.set_permissions)
        add("GET", "/files/find", self.find_in_files)
        add("GET", "/files/search", self.search_files)
        add("POST", "/files/replace", self.replace_in_files)
        add("GET", "/files/download", self.download)
        add("POST", "/files/upload", self.upload)
        add("POST", "/files/upload-v2", self.upload)
        add("POST", "/files/bulk-upload", self.bulk_upload)
        add("POST", "/files/bulk-download", self.bulk_download)

    def signed(self, request: web.Request, sandbox: Sandbox) -> bool:
        """Whether the URL itself says that its bearer may: made with the sandbox's signing key, not too old."""
        operation = request.path.partition(request.match_info.get("id", "\0"))[2]
        expires, given = request.query.get("expires", ""), request.query.get("signature", "")
        if (request.method, operation) not in _SIGNED or not re.fullmatch(r"\d{1,15}", expires):
            return False
        text = f"v1:files:{request.method}:{request.query.get('path', '')}:{expires}"
        digest = hmac.new(sandbox.signing_key.encode(), text.encode(), hashlib.sha256).digest()
        wanted = "v1_" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            return False
        return int(expires) == 0 or int(expires) > self.toolbox.ground.clock.now()

    # ------------------------------------------------------------ looking and changing

    async def list_files(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        depth = number_in(request.query.get("depth", "1"), "depth")
        agent = await self.machine.agent(sandbox)
        answer, _ = await agent.ask("list", path=_path(request, default="."), depth=depth)
        return web.json_response([_info(one) for one in answer["entries"]])

    async def file_info(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        answer, _ = await (await self.machine.agent(sandbox)).ask("stat", path=_path(request))
        return web.json_response(_info(answer["entry"]))

    async def create_folder(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        agent = await self.machine.agent(sandbox)
        mode = request.query.get("mode")
        try:
            await agent.ask("mkdir", path=_path(request), mode=_mode(mode) if mode else None)
        except AgentError as error:
            if error.kind != "exists":
                raise
        return web.Response(status=201)

    async def delete_file(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        agent = await self.machine.agent(sandbox)
        path = _path(request)
        answer, _ = await agent.ask("stat", path=path)
        entry = answer["entry"]
        if entry["kind"] == "directory" and not entry["target"] and request.query.get("recursive") != "true":
            raise Refused(400, "cannot delete directory without recursive flag", code="BAD_REQUEST")
        await agent.ask("remove", path=path)
        return web.Response(status=204)

    async def move_file(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        agent = await self.machine.agent(sandbox)
        source, destination = (request.query.get(name, "") for name in ("source", "destination"))
        if not source or not destination:
            raise Refused(400, "source and destination paths are required")
        await agent.ask("move", source=source, destination=destination)
        return web.Response(status=200)

    async def set_permissions(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        query = request.query
        fields: dict[str, Any] = {key: query[key] for key in ("owner", "group") if query.get(key)}
        if query.get("mode"):
            fields["mode"] = _mode(query["mode"])
        await (await self.machine.agent(sandbox)).ask("chmod", path=_path(request), **fields)
        return web.Response(status=200)

    # ------------------------------------------------------------ looking into files

    async def _inside(self, sandbox: Sandbox, asked: dict[str, Any]) -> Any:
        """One question to a small program in the sandbox; what it says is taken for what it is."""
        text = json.dumps({"home": self.machine.home(sandbox), **asked}).encode()
        command = (sys.executable, "-I", "-S", "-c", _search_source())
        code, printed, complaint = await self.machine.run(sandbox, command, text)
        try:
            answer = json.loads(printed.decode("utf-8", "replace"))  # names of files are any bytes
        except ValueError:
            raise Refused(500, complaint.decode("utf-8", "replace")[-500:] or f"exit code {code}") from None
        if not isinstance(answer, dict):
            raise Refused(500, "the answer is not an object")
        if "error" in answer:
            raise AgentError(str(answer["error"]), str(answer.get("message", "")))
        return answer.get("result")

    async def find_in_files(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        asked = {"op": "find", "path": _path(request), "pattern": _pattern(request)}
        return web.json_response(await self._inside(sandbox, asked))

    async def search_files(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        asked = {"op": "search", "path": _path(request), "pattern": _pattern(request)}
        return web.json_response({"files": await self._inside(sandbox, asked)})

    async def replace_in_files(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        files = body.get("files")
        if not isinstance(files, list) or not isinstance(body.get("newValue"), str):
            raise Refused(400, "files, pattern and newValue are required", code="INVALID_REQUEST_BODY")
        asked = {
            "op": "replace",
            "files": files,
            "pattern": text_of(body, "pattern"),
            "new": body["newValue"],
        }
        return web.json_response(await self._inside(sandbox, asked))

    # ------------------------------------------------------------ transfer

    async def upload(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        agent = await self.machine.agent(sandbox)
        path = _path(request)
        done = None
        async for part in parts_of(request):
            if part.name == "file":
                done = await agent.write_file(path, pieces_of(part))
        if done is None:
            raise Refused(400, "file is required")
        name = posixpath.basename(done["path"])
        return web.json_response({"name": name, "path": done["path"], "type": "file"})

    async def bulk_upload(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        agent = await self.machine.agent(sandbox)
        paths: dict[str, str] = {}
        errors: list[str] = []
        async for part in parts_of(request):
            field = _FIELD.fullmatch(part.name or "")
            if field is None:
                continue
            if field[2] == "path":
                paths[field[1]] = (await bytes_of(part)).decode("utf-8", "replace")
                continue
            path = paths.get(field[1]) or part.filename
            if not path:
                errors.append(f"file {field[1]}: missing .path metadata")
                continue
            try:
                await agent.write_file(path, pieces_of(part))
            except AgentError as error:
                errors.append(f"{path}: {error}")
                async for _ in pieces_of(part):  # the next part begins behind it
                    pass
        if errors:
            return web.json_response({"errors": errors}, status=400)
        return web.Response(status=200)

    async def download(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        agent = await self.machine.agent(sandbox)
        opened, pieces = await agent.read_file(_path(request))
        name = quote(posixpath.basename(opened["path"]))
        response = web.StreamResponse(
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f"attachment; filename*=utf-8''{name}",
            }
        )
        await response.prepare(request)
        try:
            async for piece in pieces:
                await response.write(piece)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        await response.write_eof()
        return response

    async def bulk_download(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        """One part per path, in order; one that cannot be read is a part that says why."""
        paths = (await body_of(request)).get("paths")
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
            raise Refused(400, "paths is required", code="INVALID_REQUEST_BODY")
        agent = await self.machine.agent(sandbox)
        boundary = secrets.token_hex(24)
        response = web.StreamResponse(headers={"Content-Type": f"multipart/form-data; boundary={boundary}"})
        await response.prepare(request)
        for path in paths:
            try:
                opened, pieces = await agent.read_file(path)
            except AgentError as error:
                body = json.dumps(_download_error(request, path, error)).encode()
                await response.write(
                    _head(boundary, "error", path, "application/json", len(body)) + body + b"\r\n"
                )
                continue
            # Files of /proc say 0 whatever they hold.
            size = opened["size"] or None
            await response.write(_head(boundary, "file", path, "application/octet-stream", size))
            try:
                async for piece in pieces:
                    await response.write(piece)
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]
            await response.write(b"\r\n")
        await response.write(f"--{boundary}--\r\n".encode())
        await response.write_eof()
        return response


def _download_error(request: web.Request, path: str, error: AgentError) -> dict[str, Any]:
    from lowtide.emulators.daytona.toolbox import FILE_ERRORS

    status, code = FILE_ERRORS.get(error.kind, (500, "FILE_READ_FAILED"))
    message = f"file not found: {path}" if error.kind == "ENOENT" else str(error)
    return daemon_envelope(request, status, message, code)


def _head(boundary: str, name: str, path: str, kind: str, size: int | None) -> bytes:
    plain = path.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ").replace("\n", " ")
    lines = [
        f"--{boundary}",
        f'Content-Disposition: form-data; name="{name}"; filename="{plain}"; filename*=utf-8\'\'{quote(path, safe="")}',
        f"Content-Type: {kind}",
    ]
    if size is not None:
        lines.append(f"Content-Length: {size}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")


def _path(request: web.Request, *, default: str | None = None) -> str:
    path = request.query.get("path") or default
    if not path:
        raise Refused(400, "path is required")
    if "\0" in path:
        raise Refused(400, "path holds a null byte", code="INVALID_FILE_PATH")
    return path


def _pattern(request: web.Request) -> str:
    pattern = request.query.get("pattern")
    if not pattern:
        raise Refused(400, "pattern is required")
    return pattern


def _mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{1,4}", text):
        raise Refused(400, "invalid mode format")
    return int(text, 8)


def _info(entry: dict[str, Any]) -> dict[str, Any]:
    seconds, rest = divmod(int(entry["modified_ns"]), 1_000_000_000)
    moment = datetime.fromtimestamp(seconds, UTC)
    stamp = moment.strftime("%Y-%m-%dT%H:%M:%S") + f".{rest:09d}Z"
    return {
        "name": entry["name"],
        "path": entry["path"],
        "isDir": entry["kind"] == "directory",
        "size": entry["size"],
        "mode": entry["permissions"],
        "permissions": f"{entry['mode']:04o}",
        "owner": entry["owner"],
        "group": entry["group"],
        "modTime": moment.strftime("%Y-%m-%d %H:%M:%S") + " +0000 UTC",
        "modifiedAt": stamp,
    }
