# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call,unused-ignore"
"""What runs inside the sandbox on port 49999: E2B's code interpreter API in front of Jupyter kernels.

It is handed to ``python -I -c`` as text and uses the packages of the Python that runs lowtide, which a
local sandbox sees read-only. Configuration comes as one JSON line on standard input.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

KEEPALIVE_SECONDS = 5.0
NAMES = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash"}
KINDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
config: dict[str, Any] = {}
contexts: dict[str, "Context"] = {}
defaults: dict[str, "Context"] = {}


class Unavailable(Exception):
    """This sandbox has no kernel for that language."""


def kernel_command(language: str) -> list[str]:
    python = sys.executable
    if language == "python":
        whole = "--PlainTextFormatter.max_seq_length=0"
        return [python, "-m", "ipykernel_launcher", "-f", "{connection_file}", whole]
    if language == "bash" and importlib.util.find_spec("bash_kernel"):
        return [python, "-m", "bash_kernel", "-f", "{connection_file}"]
    if language in ("javascript", "typescript") and shutil.which("node"):
        return [python, "-c", config["javascript"], "-f", "{connection_file}"]
    if language == "java" and shutil.which("javac"):
        return [python, "-c", config["java"], "-f", "{connection_file}"]
    raise Unavailable(f"there is no kernel for {language} in this sandbox")


class Context:
    """One kernel. It is started when it is first used."""

    def __init__(self, language: str, cwd: str) -> None:
        self.context_id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self.lock = asyncio.Lock()
        self.manager: Any = None
        self.client: Any = None

    async def start(self) -> None:
        if self.manager is not None:
            if await self.manager.is_alive():
                return
            await self.stop()
        # Not at the top: the port has to be open soon, and the kernels only when they are used.
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager

        argv = kernel_command(self.language)
        directory = tempfile.mkdtemp(prefix="k", dir=config["directory"])
        manager = AsyncKernelManager(transport="ipc", ip=os.path.join(directory, "z"))
        manager.connection_file = os.path.join(directory, "connection.json")
        manager._kernel_spec = KernelSpec(argv=argv, display_name=self.language, language=self.language)
        env = {**os.environ, **config["environment"]}
        if not os.path.isdir(self.cwd):  # noqa: ASYNC240 - the sandbox's own disk
            raise Unavailable(f"there is no directory {self.cwd}")
        await manager.start_kernel(cwd=self.cwd, env=env)
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=60)
        except RuntimeError:
            await manager.shutdown_kernel(now=True)
            raise Unavailable(f"the {self.language} kernel did not start") from None
        self.manager, self.client = manager, client
        if self.language == "python":
            await self.quietly(config["startup"])
        if self.language == "java":
            await self.quietly(environment_code(self.language, config["environment"], {}))

    async def stop(self) -> None:
        manager, self.manager = self.manager, None
        if self.client is not None:
            self.client.stop_channels()
            self.client = None
        if manager is not None:
            with contextlib.suppress(Exception):
                await manager.shutdown_kernel(now=True)

    async def quietly(self, code: str) -> None:
        if code:
            number = self.client.execute(code, silent=True, store_history=False, allow_stdin=False)
            async for _ in self.messages(number):
                pass

    async def messages(self, number: str) -> AsyncIterator[dict[str, Any]]:
        """What the kernel says about one request, until it is idle again; an empty one while it is silent."""
        quiet = 0.0
        while True:
            try:
                message = await self.client.get_iopub_msg(timeout=1.0)
            except Exception as error:
                if type(error).__name__ != "Empty":
                    raise
                if self.manager is None or not await self.manager.is_alive():
                    yield {"msg_type": "dead"}
                    return
                quiet += 1.0
                if quiet >= KEEPALIVE_SECONDS:
                    quiet = 0.0
                    yield {"msg_type": "silence"}
                continue
            if message["parent_header"].get("msg_id") != number:
                continue
            yield message
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return

    async def execute(self, code: str, env: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        async with self.lock:
            try:
                await self.start()
            except Unavailable as error:
                yield {"type": "error", "name": "ContextUnavailable", "value": str(error), "traceback": ""}
                return
            if env:
                await self.quietly(environment_code(self.language, env, {}))
            number = self.client.execute(code, allow_stdin=False, stop_on_error=True)
            ended = False
            try:
                async for message in self.messages(number):
                    item = described(message)
                    if item is not None:
                        yield item
                ended = True
            finally:
                if not ended and self.manager is not None:
                    # Whoever asked has left; the next one must not wait behind this.
                    await asyncio.shield(asyncio.ensure_future(self.interrupt(number)))
            if env and self.manager is not None and await self.manager.is_alive():
                restored = {name: config["environment"].get(name) for name in env}
                await self.quietly(environment_code(self.language, {}, restored))

    async def interrupt(self, number: str) -> None:
        assert self.manager is not None
        await self.manager.interrupt_kernel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                async for _ in self.messages(number):
                    pass


def described(message: dict[str, Any]) -> dict[str, Any] | None:
    """One line of the answer, or None for what nobody needs to hear."""
    kind, content = message["msg_type"], message.get("content", {})
    if kind == "silence":
        return {"type": "keepalive"}
    if kind == "dead":
        return {
            "type": "error",
            "name": "ContextRestarting",
            "value": "Context was restarted",
            "traceback": "",
        }
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    if kind == "stream":
        date = message["header"]["date"]
        stamp = date.isoformat() if isinstance(date, datetime) else datetime.now(UTC).isoformat()
        return {"type": content["name"], "text": content["text"], "timestamp": stamp}
    if kind == "error":
        trace = "".join(content["traceback"])
        return {"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": trace}
    if kind in ("display_data", "execute_result"):
        data = dict(content["data"])
        item = {name: data.pop(mime) for mime, name in KINDS.items() if data.get(mime) is not None}
        text = item.get("text")
        if text and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            item["text"] = text[1:-1]
        item = {name: value for name, value in item.items() if value not in ({}, None)}
        return {"type": "result", **item, "extra": data, "is_main_result": kind == "execute_result"}
    return None


def environment_code(language: str, wanted: dict[str, str], restored: dict[str, str | None]) -> str:
    """A snippet that sets the variables of `wanted`, and puts back those of `restored` (None: removes)."""
    values: dict[str, str | None] = {**wanted, **restored}
    lines = []
    for name, value in values.items():
        key, text = json.dumps(name), json.dumps(value)
        if language == "python":
            lines.append(f"import os; os.environ.pop({name!r}, None)")
            lines += [f"os.environ[{name!r}] = {value!r}"] if value is not None else []
        elif language in ("javascript", "typescript"):
            lines.append(f"delete process.env[{key}]" if value is None else f"process.env[{key}] = {text}")
        elif language == "bash" and name.isidentifier():
            quoted = (value or "").replace("'", "'\\''")
            lines.append(f"unset {name}" if value is None else f"export {name}='{quoted}'")
        elif language == "java":
            lines.append(
                f"System.clearProperty({key});" if value is None else f"System.setProperty({key}, {text});"
            )
    return "\n".join(lines)


async def default_context(language: str) -> Context:
    if language not in defaults:
        kernel_command(language)
        context = Context(language, config["home"])
        defaults[language] = contexts[context.context_id] = context
    return defaults[language]


async def body_of(request: web.Request, **required: type) -> dict[str, Any]:
    """The body as an object whose fields are what they may be; 422 otherwise, as the service's own server says."""
    kinds = {"language": str, "context_id": str, "cwd": str, "env_vars": dict, **required}
    try:
        asked = await request.json() if request.can_read_body else {}
    except (ValueError, LookupError, RecursionError):
        raise web.HTTPUnprocessableEntity(text="the body is not JSON") from None
    if not isinstance(asked, dict):
        raise web.HTTPUnprocessableEntity(text="the body is not an object")
    for name, kind in kinds.items():
        given = asked.get(name)
        if (given is not None or name in required) and not isinstance(given, kind):
            raise web.HTTPUnprocessableEntity(text=f"{name} must be of type {kind.__name__}")
    return asked


async def post_execute(request: web.Request) -> web.StreamResponse:
    asked = await body_of(request, code=str)
    language, context_id = asked.get("language"), asked.get("context_id")
    if language and context_id:
        return web.Response(status=400, text="Only one of context_id or language can be provided")
    try:
        if context_id and context_id != "default":
            context = contexts.get(context_id)
        else:
            language = str(language or "python").lower().strip()
            context = await default_context(NAMES.get(language, language))
        if context is None:
            return web.Response(status=404, text=f"Context {context_id} not found")
    except Unavailable as error:
        return web.Response(status=500, text=str(error))
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    items = context.execute(asked["code"], asked.get("env_vars") or {})
    try:
        async for item in items:
            await response.write(json.dumps(item).encode() + b"\n")
    finally:
        await items.aclose()  # type: ignore[attr-defined]
    await response.write(json.dumps({"type": "end_of_execution"}).encode() + b"\n")
    await response.write_eof()
    return response


async def post_contexts(request: web.Request) -> web.Response:
    asked = await body_of(request)
    language = str(asked.get("language") or "python").lower().strip()
    context = Context(NAMES.get(language, language), asked.get("cwd") or config["home"])
    try:
        async with context.lock:
            await context.start()
    except Unavailable as error:
        return web.Response(status=500, text=str(error))
    contexts[context.context_id] = context
    return web.json_response(shown(context))


async def get_contexts(request: web.Request) -> web.Response:
    return web.json_response([shown(context) for context in contexts.values()])


async def restart_context(request: web.Request) -> web.Response:
    context = contexts.get(request.match_info["id"])
    if context is None:
        return web.Response(status=404, text=f"Context {request.match_info['id']} not found")
    await context.stop()
    async with context.lock:
        await context.start()
    return web.json_response(None)


async def remove_context(request: web.Request) -> web.Response:
    context = contexts.pop(request.match_info["id"], None)
    if context is None:
        return web.Response(status=404, text=f"Context {request.match_info['id']} not found")
    for language in [name for name, one in defaults.items() if one is context]:
        del defaults[language]
    await context.stop()
    return web.json_response(None)


def shown(context: Context) -> dict[str, str]:
    return {"id": context.context_id, "language": context.language, "cwd": context.cwd}


async def health(request: web.Request) -> web.Response:
    return web.json_response("OK")


async def main() -> None:
    config.update(json.loads(sys.stdin.readline()))
    config["directory"] = tempfile.mkdtemp(prefix=".lowtide-kernels-")
    os.environ["IPYTHONDIR"] = os.path.join(config["directory"], "ipython")
    os.environ["JUPYTER_RUNTIME_DIR"] = config["directory"]
    os.environ["JUPYTER_DATA_DIR"] = config["directory"]
    app = web.Application(client_max_size=256 << 20)
    app.router.add_get("/health", health)
    app.router.add_post("/execute", post_execute)
    app.router.add_post("/contexts", post_contexts)
    app.router.add_get("/contexts", get_contexts)
    app.router.add_post("/contexts/{id}/restart", restart_context)
    app.router.add_delete("/contexts/{id}", remove_context)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", config["port"]).start()  # noqa: S104 - the sandbox's own network
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    python = await default_context("python")
    with contextlib.suppress(Unavailable):
        await default_context("javascript")
    async with python.lock:
        await python.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
