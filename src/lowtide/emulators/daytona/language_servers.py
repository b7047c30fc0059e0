"""Language servers: real ones, in the sandbox, where the machine has them: `pylsp`, `typescript-language-server`.

Each speaks JSON-RPC with a Content-Length over its standard streams. What it says is hostile: bounded, and taken only where it fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import posixpath
import sys
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused, body_of, text_of
from lowtide.emulators.finish import finished
from lowtide.errors import LowtideError
from lowtide.providers.base import STDOUT, ProcessHandle

if TYPE_CHECKING:
    from lowtide.emulators.daytona.sandbox import Sandbox
    from lowtide.emulators.daytona.toolbox import Toolbox

_COMMANDS: dict[str, tuple[str, ...]] = {
    "python": (sys.executable, "-m", "pylsp"),
    "typescript": ("typescript-language-server", "--stdio"),
    "javascript": ("typescript-language-server", "--stdio"),
}
_NEED = {"python": "python-lsp-server, beside lowtide"}
_LARGEST_MESSAGE = 16 << 20
_ANSWER_SECONDS = 60.0
_START_SECONDS = 60.0
_MOST_SERVERS = 8  # of a sandbox


class LanguageServers:
    def __init__(self, toolbox: Toolbox) -> None:
        self.machine = toolbox.sandboxes.machine
        self._servers: dict[tuple[str, str, str], _Server] = {}

    def add_calls(self, add: Callable[..., None]) -> None:
        add("POST", "/lsp/start", self.lsp_start)
        add("POST", "/lsp/stop", self.lsp_stop)
        add("POST", "/lsp/did-open", self.lsp_did_open)
        add("POST", "/lsp/did-close", self.lsp_did_close)
        add("POST", "/lsp/completions", self.lsp_completions)
        add("GET", "/lsp/document-symbols", self.lsp_document_symbols)
        add("GET", "/lsp/workspacesymbols", self.lsp_workspace_symbols)

    async def lsp_start(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        language, path = text_of(body, "languageId"), text_of(body, "pathToProject")
        key = (sandbox.sandbox_id, language, path)
        self._servers = {one: server for one, server in self._servers.items() if not server.ended}
        if key not in self._servers:
            if language not in _COMMANDS:
                raise Refused(400, f"no language server for {language}")
            if sum(one[0] == sandbox.sandbox_id for one in self._servers) >= _MOST_SERVERS:
                raise Refused(400, f"a sandbox has {_MOST_SERVERS} language servers at most")
            where = await self.machine.directory(sandbox, path)
            handle = await self.machine.start(sandbox, _COMMANDS[language], cwd=where, stdin=True)
            server = self._servers[key] = _Server(handle)
            try:
                await server.initialize(f"file://{quote(where)}")
            except Refused:
                self._servers.pop(key, None)
                await server.aclose()
                need = _NEED.get(language, _COMMANDS[language][0])
                raise Refused(501, f"the language server is not available: it needs {need}") from None
        return web.json_response({})

    async def lsp_stop(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        key = (sandbox.sandbox_id, text_of(body, "languageId"), text_of(body, "pathToProject"))
        server = self._servers.pop(key, None)
        if server is not None:
            await server.aclose()
        return web.json_response({})

    async def lsp_did_open(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        server = self._server(sandbox, body)
        uri, path = self._document(sandbox, body)
        _, pieces = await (await self.machine.agent(sandbox)).read_file(path)
        content = bytearray()
        async for piece in pieces:
            content += piece
            if len(content) > _LARGEST_MESSAGE // 4:
                await cast(AsyncGenerator[bytes], pieces).aclose()
                raise Refused(400, f"{path} is too large")
        text = content.decode(errors="replace")
        document = {"uri": uri, "languageId": body["languageId"], "version": 1, "text": text}
        await server.tell("textDocument/didOpen", {"textDocument": document})
        return web.json_response({})

    async def lsp_did_close(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        uri, _ = self._document(sandbox, body)
        await self._server(sandbox, body).tell("textDocument/didClose", {"textDocument": {"uri": uri}})
        return web.json_response({})

    async def lsp_completions(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        position = body.get("position")
        if not isinstance(position, dict) or not all(
            type(position.get(name)) is int and 0 <= position[name] < 2**31 for name in ("line", "character")
        ):
            raise Refused(400, "position needs a line and a character")
        uri, _ = self._document(sandbox, body)
        asked = {"textDocument": {"uri": uri}, "position": position, "context": {"triggerKind": 1}}
        found = await self._server(sandbox, body).ask("textDocument/completion", asked)
        items = found.get("items") if isinstance(found, dict) else found
        complete = not (isinstance(found, dict) and found.get("isIncomplete"))
        shown = [_completion(one) for one in items or [] if isinstance(one, dict) and "label" in one]
        return web.json_response({"isIncomplete": not complete, "items": shown})

    async def lsp_document_symbols(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        asked = dict(request.query)
        uri, _ = self._document(sandbox, asked)
        found = await self._server(sandbox, asked).ask(
            "textDocument/documentSymbol", {"textDocument": {"uri": uri}}
        )
        return web.json_response(_symbols(found, uri))

    async def lsp_workspace_symbols(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        asked = dict(request.query)
        server = self._server(sandbox, asked)
        if not server.can.get("workspaceSymbolProvider"):
            return web.json_response([])
        return web.json_response(
            _symbols(await server.ask("workspace/symbol", {"query": asked.get("query", "")}))
        )

    def _server(self, sandbox: Sandbox, asked: dict[str, Any]) -> _Server:
        key = (sandbox.sandbox_id, text_of(asked, "languageId"), text_of(asked, "pathToProject"))
        server = self._servers.get(key)
        if server is None or server.ended:
            raise Refused(400, "the language server is not running: start it first")
        return server

    def _document(self, sandbox: Sandbox, asked: dict[str, Any]) -> tuple[str, str]:
        given = text_of(asked, "uri").removeprefix("file://")
        project = self.machine.path(sandbox, text_of(asked, "pathToProject"))
        path = posixpath.normpath(posixpath.join(project, given))
        return f"file://{quote(path)}", path


class _Server:
    """One process, asked and told things."""

    def __init__(self, handle: ProcessHandle) -> None:
        self._handle = handle
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.can: dict[str, Any] = {}
        self.ended = False
        self._sending = asyncio.Lock()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def initialize(self, root: str) -> None:
        asked: dict[str, Any] = {"processId": None, "rootUri": root, "capabilities": {}}
        found = await self.ask("initialize", asked, _START_SECONDS)
        can = found.get("capabilities") if isinstance(found, dict) else None
        self.can = can if isinstance(can, dict) else {}
        await self.tell("initialized", {})

    async def ask(self, method: str, params: dict[str, Any], seconds: float = _ANSWER_SECONDS) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send({"id": number, "method": method, "params": params})
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise Refused(400, f"{method}: the language server does not answer") from None
        finally:
            self._waiting.pop(number, None)

    async def tell(self, method: str, params: dict[str, Any]) -> None:
        await self._send({"method": method, "params": params})

    async def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        try:
            await finished(self._write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data)))
        except (BrokenPipeError, LowtideError):
            raise Refused(400, "the language server has ended") from None

    async def _write(self, message: bytes) -> None:
        """Whole, and not between the parts of another one: it is longer than a pipe takes at once."""
        async with self._sending:
            if self.ended:
                raise BrokenPipeError
            await self._handle.write_stdin(message)

    async def _read(self) -> None:
        buffer = bytearray()
        try:
            async for stream, data in self._handle.output():
                if stream != STDOUT:
                    continue
                buffer += data
                while (message := _next(buffer)) is not None:
                    await self._take(message)
        except (ValueError, LowtideError):
            pass
        finally:
            self.ended = True
            for one in self._waiting.values():
                if not one.done():
                    one.set_exception(Refused(400, "the language server has ended"))

    async def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            return
        number = message.get("id")
        if "method" in message:
            if number is not None:  # it asks for something of an editor, which there is none of
                with contextlib.suppress(Refused):
                    await self._send({"id": number, "result": None})
            return
        answer = self._waiting.get(number) if isinstance(number, int) else None
        if answer is None or answer.done():
            return
        error = message.get("error")
        if error is not None:
            said = error.get("message") if isinstance(error, dict) else error
            answer.set_exception(Refused(400, f"the language server refused: {str(said)[:300]}"))
        else:
            answer.set_result(message.get("result"))

    async def aclose(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(LowtideError):
            await self._handle.terminate(0.0)
        await self._handle.aclose()


def _next(buffer: bytearray) -> Any:
    """The next whole message, taken out of the buffer; None while there is none. ValueError for what is none."""
    head, found, _ = bytes(buffer[:4096]).partition(b"\r\n\r\n")
    if not found:
        if len(buffer) > 4096:
            raise ValueError("no head")
        return None
    lengths = [
        line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    ]
    size = int(lengths[0]) if lengths else -1
    if not 0 <= size <= _LARGEST_MESSAGE:
        raise ValueError("no length")
    start = len(head) + 4
    if len(buffer) < start + size:
        return None
    message = json.loads(bytes(buffer[start : start + size]))
    del buffer[: start + size]
    return message


def _completion(item: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"label": str(item["label"])}
    if type(item.get("kind")) is int:
        shown["kind"] = item["kind"]
    for name in ("detail", "filterText", "insertText", "sortText"):
        if isinstance(item.get(name), str):
            shown[name] = item[name]
    documentation = item.get("documentation")
    if isinstance(documentation, str):
        documentation = {"kind": "plaintext", "value": documentation}
    if isinstance(documentation, dict):
        shown["documentation"] = documentation
    return shown


def _symbols(found: Any, uri: str = "") -> list[dict[str, Any]]:
    """Both forms of a symbol in the flat one; what is inside another one comes after it."""
    shown = []
    level = list(found) if isinstance(found, list) else []
    while level:
        one = level.pop(0)
        if not isinstance(one, dict):
            continue
        location = one.get("location") or {"uri": uri, "range": one.get("range")}
        if isinstance(one.get("name"), str) and type(one.get("kind")) is int and isinstance(location, dict):
            shown.append({"name": one["name"], "kind": one["kind"], "location": location})
        inside = one.get("children")
        level[:0] = inside if isinstance(inside, list) else []
    return shown
