"""`lowtide ui`: the fleet as a web page on loopback, for the person who started it.

Who may use it: the link that the terminal prints holds a token that works once; it is exchanged for a cookie. Every
request is checked for its host, and every request that changes something or opens a WebSocket for its origin, so that
no other page in the same browser can act. Everything a sandbox names or prints is data: the page builds its text nodes
from JSON, and a file from a sandbox is never served as something that a browser runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

from aiohttp import WSMsgType, web

from lowtide.engine import engine
from lowtide.errors import LowtideError, SandboxGone, SandboxNotFoundError, ValidationError
from lowtide.lifecycle.sweep import Action, Finding
from lowtide.providers.optional import FileKind
from lowtide.sandbox import Sandbox
from lowtide.ui import actions
from lowtide.ui.fleet import Fleet, Row
from lowtide.ui.prices import Prices

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

READ_SECONDS = 1.0
PROVIDER_SECONDS = 5.0
REQUEST_SECONDS = 10.0
"""How long a new connection may take to send the head of its first request."""
MOST_CONNECTIONS = 128
MOST_STREAMS = 32
MOST_TERMINALS = 16
MOST_ROWS = 5000
TREND_SAMPLES = 720
PREVIEW_BYTES = 256 * 1024
OUTPUT_BYTES = 256 * 1024
COMMAND_SECONDS = 120.0
DIRECTORY_ENTRIES = 2000

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# xterm.js writes style elements. Its document holds nothing else, and only our own page may frame it.
_TERMINAL_HEADERS = {
    **_HEADERS,
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Frame-Options": "SAMEORIGIN",
}

_STATIC = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/terminal": ("terminal.html", "text/html"),
    "/terminal.js": ("terminal.js", "text/javascript"),
    "/xterm.js": ("vendor/xterm.mjs", "text/javascript"),
    "/addon-fit.js": ("vendor/addon-fit.mjs", "text/javascript"),
    "/xterm.css": ("vendor/xterm.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


@dataclass(slots=True)
class Ui:
    """The state behind the page, and its request handlers."""

    fleet: Fleet
    prices: Prices
    settings: Callable[[], list[dict[str, Any]]]
    """The rows of `lowtide config`."""
    doctor: Callable[[], list[dict[str, Any]]]
    """The findings of `lowtide doctor`; takes seconds and runs in a thread."""
    announce: Callable[[str], None] = lambda link: None
    """Told each new link: the first, and another one after a link was used."""
    _port: int = 0
    _link_token: str = ""
    _cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _rows: list[Row] = field(default_factory=list)
    _problem: str = ""
    _trend: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TREND_SAMPLES))
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _streams: int = 0
    _terminals: int = 0
    _previewed_sweep: frozenset[tuple[str, str]] | None = None

    # Serving.

    @contextlib.asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[str]:
        """Serve on 127.0.0.1 and yield the first link. Port 0 takes any free port."""
        app = web.Application(middlewares=[self._guard], client_max_size=64 * 1024)
        for path in _STATIC:
            app.router.add_get(path, self._static)
        app.router.add_get("/open", self._open)
        app.router.add_get("/api/fleet", self._api_fleet)
        app.router.add_get("/api/events", self._api_events)
        app.router.add_get("/api/sweep", self._api_sweep_preview)
        app.router.add_post("/api/sweep", self._api_sweep)
        app.router.add_get("/api/settings", self._api_settings)
        app.router.add_get("/api/doctor", self._api_doctor)
        one = "/api/sandbox/{provider}/{id}"
        app.router.add_get(one, self._api_sandbox)
        app.router.add_post(one + "/stop", self._api_stop)
        app.router.add_post(one + "/keep", self._api_keep)
        app.router.add_post(one + "/exec", self._api_exec)
        app.router.add_post(one + "/url", self._api_url)
        app.router.add_get(one + "/files", self._api_files)
        app.router.add_get(one + "/file", self._api_file)
        app.router.add_get(one + "/image", self._api_image)
        app.router.add_get(one + "/terminal", self._api_terminal)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=2.0)
        await runner.setup()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        connections = _Connections(runner.server)
        try:
            listening = await loop.create_server(connections, "127.0.0.1", port)
        except OSError as error:
            await runner.cleanup()
            raise ValidationError(
                f"port {port} of 127.0.0.1 cannot be served: {error.strerror}; --port 0 takes any free port",
                argument="--port",
            ) from error
        self._port = listening.sockets[0].getsockname()[1]
        reading = [asyncio.create_task(self._read_ledger()), asyncio.create_task(self._ask_providers())]
        try:
            yield self._new_link()
        finally:
            listening.close()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            await _on_engine(self.fleet.aclose())
            await runner.cleanup()

    async def _read_ledger(self) -> None:
        sampled = 0.0
        while True:
            try:
                self._rows = (await _on_engine(self.fleet.rows()))[-MOST_ROWS:]
                self._problem = ""
            except LowtideError as error:
                self._problem = str(error)
            if time.monotonic() - sampled >= PROVIDER_SECONDS:
                sampled = time.monotonic()
                self._trend.append((time.time(), sum(row.open for row in self._rows)))
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(READ_SECONDS)

    async def _ask_providers(self) -> None:
        while True:
            await _on_engine(self.fleet.refresh())
            await asyncio.sleep(PROVIDER_SECONDS)

    # Who may.

    def _new_link(self) -> str:
        self._link_token = secrets.token_urlsafe(24)
        return f"http://127.0.0.1:{self._port}/open?token={self._link_token}"

    @property
    def _cookie_name(self) -> str:
        return f"lowtide_ui_{self._port}"  # a browser sends a cookie to every port of the host

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await self._checked(request, handler)
        except web.HTTPException as refusal:
            refusal.headers.update(_HEADERS)
            raise
        except (SandboxNotFoundError, SandboxGone) as error:
            response = _problem(404, str(error))
        except ValidationError as error:
            response = _problem(400, str(error))
        except LowtideError as error:
            response = _problem(502, str(error))
        except FileNotFoundError as error:
            response = _problem(404, str(error))
        except OSError as error:
            response = _problem(502, str(error))
        if not response.prepared:
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
        return response

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = (f"127.0.0.1:{self._port}", f"localhost:{self._port}")
        host = request.headers.get("Host", "")
        if host not in hosts:  # another name for this address: DNS rebinding
            raise web.HTTPForbidden(text="this server answers to 127.0.0.1 and localhost only")
        origin = request.headers.get("Origin")
        changes = request.method not in ("GET", "HEAD") or "Upgrade" in request.headers
        if (origin is not None or changes) and origin != f"http://{host}":
            raise web.HTTPForbidden(text="requests from other origins are refused")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise web.HTTPForbidden(text="requests from other sites are refused")
        if request.path == "/open":
            return await handler(request)
        if not hmac.compare_digest(
            request.cookies.get(self._cookie_name, "").encode(), self._cookie.encode()
        ):
            raise web.HTTPForbidden(text="open the link that `lowtide ui` printed in its terminal")
        return await handler(request)

    async def _open(self, request: web.Request) -> web.StreamResponse:
        given = request.query.get("token", "")
        if not self._link_token or not hmac.compare_digest(given.encode(), self._link_token.encode()):
            raise web.HTTPForbidden(
                text="this link was used already: `lowtide ui` prints a new one after each use"
            )
        self.announce(self._new_link())
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie_name, self._cookie, httponly=True, samesite="Strict", path="/")
        return response

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name, kind = _STATIC[request.path]
        content = resources.files("lowtide.ui").joinpath("static", *name.split("/")).read_bytes()
        headers = _TERMINAL_HEADERS if request.path == "/terminal" else _HEADERS
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)

    # The fleet.

    def _state(self) -> dict[str, Any]:
        now = time.time()
        return {
            "now": now,
            "currency": self.prices.currency,
            "problem": self._problem,
            "problems": dict(self.fleet.problems),
            "trend": list(self._trend),
            "rows": [self._row(row, now) for row in self._rows],
        }

    def _row(self, row: Row, now: float) -> dict[str, Any]:
        cost = None
        if row.open and row.created_at is not None:
            cost = self.prices.cost(row.provider, now - row.created_at)
        return {
            "id": row.id,
            "provider": row.provider,
            "state": row.state,
            "open": row.open,
            "tags": row.tags,
            "owner": row.owner_text,
            "owner_state": row.owner_state,
            "created_at": row.created_at,
            "ends_at": row.ends_at if row.open else None,
            "kept": row.kept_until is not None,
            "reason": row.reason,
            "session": row.session,
            "cost": cost,
        }

    async def _api_fleet(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._state())

    async def _api_events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the whole state first, then the rows that changed."""
        if self._streams >= MOST_STREAMS:
            return _problem(503, f"more than {MOST_STREAMS} pages are open")
        self._streams += 1
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            known: dict[str, str] = {}
            while True:
                state = self._state()
                rows = {f"{row['provider']}/{row['id']}": row for row in state.pop("rows")}
                shapes = {key: json.dumps({**row, "cost": None}) for key, row in rows.items()}
                changed = [rows[key] for key, shape in shapes.items() if known.get(key) != shape]
                event = {**state, "changed": changed, "removed": [key for key in known if key not in rows]}
                known = shapes
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                async with self._changed:
                    await self._changed.wait()
        except ConnectionError:
            return response
        finally:
            self._streams -= 1

    def _named(self, request: web.Request) -> Row:
        provider, identity = request.match_info["provider"], request.match_info["id"]
        for row in self._rows:
            if row.provider == provider and row.id == identity:
                return row
        raise SandboxNotFoundError(f"no sandbox {identity} on provider {provider!r}")

    async def _api_sandbox(self, request: web.Request) -> web.StreamResponse:
        row = self._named(request)
        lines = await _on_engine(actions.history(row))
        return web.json_response(
            {
                "row": self._row(row, time.time()),
                "history": [
                    {"at": line.at, "state": str(line.after), "pid": line.pid, "why": line.why}
                    for line in lines
                ],
                "can_enter": actions.can_be_entered(row),
            }
        )

    # Acting.

    async def _api_stop(self, request: web.Request) -> web.StreamResponse:
        report = await _on_engine(actions.stop(self._named(request)))
        if report.error is not None:
            return _problem(502, str(report.error))
        return web.json_response({"outcome": str(report.outcome), "why": report.why})

    async def _api_keep(self, request: web.Request) -> web.StreamResponse:
        given = await _body(request)
        seconds = given.get("seconds", actions.KEEP_SECONDS)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds <= 30 * 86_400
        ):
            raise ValidationError("seconds must be between 0 and 30 days", argument="seconds")
        lease = await _on_engine(
            actions.keep(
                self._named(request), keep_for_seconds=float(seconds), take=given.get("take") is True
            )
        )
        return web.json_response({"kept_until": lease.kept_until})

    async def _api_exec(self, request: web.Request) -> web.StreamResponse:
        line = (await _body(request)).get("command")
        if not isinstance(line, str) or not line.strip():
            raise ValidationError("command must be a shell command", argument="command")
        sandbox = await self._sandbox(request)
        started = time.monotonic()
        result = await sandbox.exec(
            ["/bin/sh", "-c", line], timeout_seconds=COMMAND_SECONDS, max_output_bytes=OUTPUT_BYTES
        )
        return web.json_response(
            {
                "returncode": result.returncode,
                "stdout": result.stdout,
                "stderr": result.stderr,
                "seconds": time.monotonic() - started,
            }
        )

    async def _api_url(self, request: web.Request) -> web.StreamResponse:
        port = (await _body(request)).get("port")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ValidationError("port must be a number from 1 to 65535", argument="port")
        found = await (await self._sandbox(request)).url(port)
        if not found.url.startswith(("http://", "https://")):
            return _problem(502, "the provider returned an address that is no web address")
        return web.json_response({"url": found.url, "needs_headers": sorted(found.headers)})

    async def _sandbox(self, request: web.Request) -> Sandbox:
        row = self._named(request)
        return await Sandbox.from_id(row.id, provider=row.provider)

    # Files.

    async def _api_files(self, request: web.Request) -> web.StreamResponse:
        sandbox = await self._sandbox(request)
        entries = await sandbox.list_dir(request.query.get("path") or "/")
        shown = sorted(entries, key=lambda one: (one.kind is not FileKind.DIRECTORY, one.name))
        return web.json_response(
            {
                "more": max(0, len(shown) - DIRECTORY_ENTRIES),
                "entries": [
                    {
                        "name": _text(one.name),
                        "path": _text(one.path),
                        "kind": str(one.kind),
                        "size": one.size,
                        "mode": one.mode,
                        "target": None if one.target is None else _text(one.target),
                    }
                    for one in shown[:DIRECTORY_ENTRIES]
                ],
            }
        )

    async def _api_file(self, request: web.Request) -> web.StreamResponse:
        """The beginning of a file as JSON text; the kind of image where it is one."""
        content, more = await self._beginning(request)
        kind = next((kind for magic, kind in _IMAGES if content.startswith(magic)), None)
        binary = kind is None and b"\0" in content[:8192]
        text = "" if kind or binary else content.decode("utf-8", "replace")
        return web.json_response(
            {"text": text, "image": kind is not None and not more, "binary": binary, "more": more}
        )

    async def _api_image(self, request: web.Request) -> web.StreamResponse:
        content, more = await self._beginning(request)
        kind = next((kind for magic, kind in _IMAGES if content.startswith(magic)), None)
        if kind is None or more:
            return _problem(415, "no image, or one that is too large for a preview")
        headers = {**_HEADERS, "Content-Security-Policy": "default-src 'none'; sandbox"}
        return web.Response(body=content, content_type=kind, headers=headers)

    async def _beginning(self, request: web.Request) -> tuple[bytes, bool]:
        sandbox = await self._sandbox(request)
        path = request.query.get("path", "")
        entry = await sandbox.stat(path)
        if entry.kind is FileKind.SYMLINK or entry.kind is FileKind.OTHER:
            raise ValidationError("links, devices and pipes have no preview", argument="path")
        taken = b""
        reader = sandbox.read_file_streaming(path)
        try:
            async with asyncio.timeout(20):
                async for chunk in reader:
                    taken += chunk
                    if len(taken) > PREVIEW_BYTES:
                        return taken[:PREVIEW_BYTES], True
        finally:
            reader.close()
        return taken, False

    # The terminal.

    async def _api_terminal(self, request: web.Request) -> web.StreamResponse:
        """A shell on a WebSocket: bytes both ways, and `{"columns": 80, "rows": 24}` as text for a new size."""
        if self._terminals >= MOST_TERMINALS:
            return _problem(503, f"more than {MOST_TERMINALS} terminals are open")
        sandbox = await self._sandbox(request)
        socket = web.WebSocketResponse(heartbeat=20.0, max_msg_size=64 * 1024)
        await socket.prepare(request)
        self._terminals += 1
        try:
            shell = sandbox.shell(width=80, height=24)
            showing = asyncio.create_task(_show(shell.output, socket))
            try:
                async for message in socket:
                    if message.type is WSMsgType.BINARY:
                        await shell.stdin.write(message.data)
                    elif message.type is WSMsgType.TEXT:
                        columns, rows = _size(message.data)
                        await shell.resize(columns, rows)
            except (LowtideError, BrokenPipeError, ValueError) as error:
                await socket.close(message=str(error).encode()[:100])
            finally:
                showing.cancel()
                shell.cancel()
                await asyncio.gather(showing, return_exceptions=True)
        finally:
            self._terminals -= 1
        return socket

    # Sweep, settings, doctor.

    async def _api_sweep_preview(self, request: web.Request) -> web.StreamResponse:
        findings = await self._swept(dry_run=True)
        self._previewed_sweep = _to_end(findings)
        return web.json_response({"findings": [_finding(one) for one in findings]})

    async def _api_sweep(self, request: web.Request) -> web.StreamResponse:
        """Sweep after a preview: refused when there is more to end now than the person was shown."""
        now = _to_end(await self._swept(dry_run=True))
        if self._previewed_sweep is None or not now <= self._previewed_sweep:
            return _problem(409, "the fleet has changed since the preview: look again")
        self._previewed_sweep = None
        return web.json_response({"findings": [_finding(one) for one in await self._swept(dry_run=False)]})

    async def _swept(self, *, dry_run: bool) -> list[Finding]:
        names = list(dict.fromkeys(row.provider for row in self._rows))
        return await _on_engine(actions.run_sweep(names, dry_run=dry_run))

    async def _api_settings(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"settings": self.settings()}, dumps=_dumps)

    async def _api_doctor(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"findings": await asyncio.to_thread(self.doctor)}, dumps=_dumps)


@dataclass(slots=True)
class _Connections:
    """The protocol factory: bounds how many connections are open and how long one may stay silent."""

    server: web.Server
    open: int = 0

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self.server())


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, and closes what is one too many or sends no request in time."""

    def __init__(self, connections: _Connections, inner: asyncio.Protocol) -> None:
        self._connections, self._inner = connections, inner
        self._head = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.open += 1
        self._inner.connection_made(transport)
        if self._connections.open > MOST_CONNECTIONS:
            transport.close()
        else:
            self._deadline = asyncio.get_running_loop().call_later(REQUEST_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.open -= 1
        self._in_time()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None:
            self._head = (self._head + data)[-65536:]
            if b"\r\n\r\n" in self._head:
                self._in_time()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _in_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._head = None, b""


async def _on_engine(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on lowtide's event loop and wait for it on this one."""
    return await asyncio.wrap_future(engine().submit(work))


async def _body(request: web.Request) -> Mapping[str, Any]:
    if request.content_type != "application/json":  # what a form of another site cannot send
        raise ValidationError("the body must be JSON", argument="body")
    try:
        given = await request.json()
    except ValueError as error:
        raise ValidationError("the body is no JSON", argument="body") from error
    if not isinstance(given, dict):
        raise ValidationError("the body must be a JSON object", argument="body")
    return given


def _problem(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=_HEADERS)


def _dumps(value: Any) -> str:
    return json.dumps(value, default=str)


def _text(name: str) -> str:
    """A file name that is no UTF-8 has surrogates, which JSON cannot carry to a browser."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _size(text: str) -> tuple[int, int]:
    size = json.loads(text)
    if not isinstance(size, dict):
        raise ValueError("the size must be an object")
    columns, rows = size.get("columns"), size.get("rows")
    if not (isinstance(columns, int) and isinstance(rows, int) and 0 < columns < 1000 and 0 < rows < 1000):
        raise ValueError("the size must be two numbers below 1000")
    return columns, rows


async def _show(output: Any, socket: web.WebSocketResponse) -> None:
    with contextlib.suppress(ConnectionError, LowtideError):
        async for chunk in output:
            await socket.send_bytes(chunk)
    await socket.close()


def _to_end(findings: Sequence[Finding]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (one.provider, one.sandbox_id or one.lease_id or "")
        for one in findings
        if one.action is Action.WOULD_END
    )


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "action": str(one.action),
        "provider": one.provider,
        "id": one.sandbox_id or one.lease_id,
        "why": one.why,
        "age_seconds": one.age_seconds,
        "tags": one.tags,
    }
