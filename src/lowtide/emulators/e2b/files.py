"""envd's ``/files``: downloads and uploads, with a token or a signed URL."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import posixpath
import re
import zlib
from collections.abc import AsyncIterable
from email.message import Message
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aiohttp import BodyPartReader, web

from lowtide.emulators.agent.client import PIECE, Agent, AgentError
from lowtide.emulators.e2b import connect
from lowtide.emulators.e2b.model import Sandbox, UnknownUser
from lowtide.emulators.multipart import parts_of, pieces_of

if TYPE_CHECKING:
    from lowtide.emulators.e2b import E2BEmulator

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PREFIX = "x-metadata-"
_LONGEST_NAME, _LONGEST_VALUE = 246, 4096  # a file's extended attributes hold no more
_STATUS = {
    "ENOENT": 404,
    "is-a-directory": 400,
    "not-a-directory": 400,
    "invalid": 400,
    "ENOTDIR": 400,
    "ENAMETOOLONG": 400,
    "ERANGE": 400,
    "E2BIG": 400,
    "ENOSPC": 507,
    "EDQUOT": 507,
}


class Files:
    def __init__(self, emulator: E2BEmulator) -> None:
        self.emulator = emulator
        self.sandboxes = emulator.sandboxes_table

    async def call(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        if request.method not in ("GET", "POST"):
            return _error(405, "method not allowed")
        refused = self._refused(request, sandbox)
        if refused is not None:
            return _error(401, refused)
        user = request.query.get("username") or "user"
        if "username" not in request.query and "signature" not in request.query:
            user = connect.user_of(request) or user  # of a signed address, only what was signed counts
        try:
            agent = await self.sandboxes.agent(sandbox, user)
            if request.method == "GET":
                return await self._download(request, sandbox, agent)
            return await self._upload(request, sandbox, user, agent)
        except UnknownUser as error:
            return _error(401, f"error looking up user '{user}': {error}")
        except AgentError as error:
            return _error(_STATUS.get(error.kind, 500), str(error))

    def signed_sandbox(self, request: web.Request) -> Sandbox | None:
        """The sandbox a signed URL without any id was made for: the one whose token makes that signature."""
        given = request.query.get("signature")
        if given is None:
            return None
        for sandbox in self.sandboxes.table.values():
            if sandbox.envd_token and hmac.compare_digest(
                self._signature(request, sandbox).encode(), given.encode()
            ):
                return sandbox
        return None

    def _signature(self, request: web.Request, sandbox: Sandbox) -> str:
        query = request.query
        what = "read" if request.method == "GET" else "write"
        parts = [query.get("path", ""), what, query.get("username", ""), sandbox.envd_token or ""]
        if "signature_expiration" in query:
            parts.append(query["signature_expiration"])
        digest = hashlib.sha256(":".join(parts).encode()).digest()
        return "v1_" + base64.b64encode(digest).decode().rstrip("=")

    def _refused(self, request: web.Request, sandbox: Sandbox) -> str | None:
        """Why the caller may not; None when it may."""
        if sandbox.envd_token is None:
            return None
        token = request.headers.get("X-Access-Token", "")
        if token:
            if hmac.compare_digest(token.encode(), sandbox.envd_token.encode()):
                return None
            return "access token present in header but does not match"
        given = request.query.get("signature")
        if given is None:
            return "missing signature query parameter"
        if not hmac.compare_digest(self._signature(request, sandbox).encode(), given.encode()):
            return "invalid signature"
        expiry = request.query.get("signature_expiration")
        if expiry is not None:
            if not re.fullmatch(r"-?\d{1,15}", expiry):
                return "invalid signature"
            if int(expiry) < self.emulator.ground.clock.now():
                return "signature is already expired"
        return None

    async def _download(self, request: web.Request, sandbox: Sandbox, agent: Agent) -> web.StreamResponse:
        path = request.query.get("path", "")
        if posixpath.normpath(path) == _BOOT_ID:
            # The sandbox shares this machine's kernel; a machine of its own would have its own boot.
            return web.Response(text=sandbox.boot_id + "\n")
        try:
            opened, pieces = await agent.read_file(path)
        except AgentError as error:
            if error.kind == "ENOENT":
                raise AgentError("ENOENT", f"path '{path}' does not exist") from None
            raise
        name = posixpath.basename(opened["path"])
        response = web.StreamResponse(
            headers={
                "Content-Disposition": f"inline; filename*=utf-8''{quote(name)}",
                "Content-Type": "application/octet-stream",
                "Vary": "Accept-Encoding",
            }
        )
        squeeze = None
        if "gzip" in request.headers.get("Accept-Encoding", "").replace(" ", "").split(","):
            response.headers["Content-Encoding"] = "gzip"
            squeeze = zlib.compressobj(level=1, wbits=31)
        await response.prepare(request)
        try:
            async for piece in pieces:
                await response.write(squeeze.compress(piece) if squeeze else piece)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        if squeeze:
            await response.write(squeeze.flush())
        await response.write_eof()
        return response

    async def _write(
        self,
        sandbox: Sandbox,
        user: str,
        agent: Agent,
        path: str,
        chunks: AsyncIterable[bytes],
        metadata: dict[str, str],
    ) -> dict[str, Any]:
        if path.startswith("/") and not path.startswith(("/home/", "/tmp/")):  # noqa: S108 - of the sandbox
            with contextlib.suppress(AgentError):  # it is there, or the write says why it cannot be
                await self.sandboxes.make_directory(sandbox, user, posixpath.dirname(path))
        done = await agent.write_file(path, chunks, metadata=metadata)
        described: dict[str, Any] = {
            "path": done["path"],
            "name": posixpath.basename(done["path"]),
            "type": "file",
        }
        if done["metadata"]:
            described["metadata"] = done["metadata"]
        return described

    async def _upload(
        self, request: web.Request, sandbox: Sandbox, user: str, agent: Agent
    ) -> web.StreamResponse:
        metadata = {
            name.lower().removeprefix(_PREFIX): value
            for name, value in request.headers.items()
            if name.lower().startswith(_PREFIX) and len(name) > len(_PREFIX)
        }
        if any(len(name) > _LONGEST_NAME or len(value) > _LONGEST_VALUE for name, value in metadata.items()):
            return _error(400, f"metadata has names of {_LONGEST_NAME} characters at most, and short values")
        path = request.query.get("path")
        kind = request.content_type
        written: list[dict[str, Any]] = []
        if kind == "application/octet-stream":
            if path is None:
                return _error(400, "path query parameter is required for raw body upload")
            written.append(
                await self._write(sandbox, user, agent, path, request.content.iter_chunked(PIECE), metadata)
            )
        elif kind.startswith("multipart/"):
            async for part in parts_of(request):
                if part.name != "file":
                    continue
                target = path if path is not None else _file_name(part)
                if not target:
                    return _error(400, "error getting multipart custom part file name")
                written.append(await self._write(sandbox, user, agent, target, pieces_of(part), metadata))
        else:
            message = (
                f"unsupported content type: {kind}, expected multipart/form-data or application/octet-stream"
            )
            return _error(400, message)
        return web.json_response(written)


def _file_name(part: BodyPartReader) -> str | None:
    """As it was sent: aiohttp's own `filename` drops a leading slash, and the path with it."""
    head = Message()
    head["Content-Disposition"] = part.headers.get("Content-Disposition", "")
    return head.get_filename()


def _error(code: int, message: str) -> web.Response:
    return web.json_response({"code": code, "message": message}, status=code)
