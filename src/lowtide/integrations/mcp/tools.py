"""The nine tools: commands, code, sandboxes, files and ports, in the words a model reads."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from lowtide.errors import CommandTimeoutError, LowtideError, OutputLimitError, SandboxGone, ValidationError
from lowtide.integrations.mcp import answers
from lowtide.integrations.mcp.connection import Connection
from lowtide.process import Process, ProcessResult
from lowtide.sandbox import Sandbox

P = ParamSpec("P")
T = TypeVar("T")

Where = Annotated[
    str | None,
    Field(
        description="A sandbox's id. Leave it out for the connection's own, which is made when first needed."
    ),
]
Seconds = Annotated[
    float | None, Field(gt=0, description="End it after this many seconds; the answer has the output so far.")
]

_DIRECTORY_ENTRIES = 1000
_TICK_SECONDS = 1.0
_ERROR_BYTES = 8192  # it names what was asked for, which may be of any length

_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; fi; exec sh -c "$0"'


def add_tools(server: MCPServer[Any], connection_of: Callable[[Context[Any, Any]], Connection]) -> None:
    """Register all nine. `connection_of` finds whose call it is."""

    def tool(title: str, **hints: bool) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        return lambda call: server.tool(
            structured_output=True, annotations=ToolAnnotations(title=title, **hints)
        )(_told(call))

    @tool("Run a command", read_only_hint=False, destructive_hint=True, open_world_hint=True)
    async def run_command(
        ctx: Context[Any, Any],
        command: Annotated[
            str, Field(description="A shell command line, run with bash, or sh where there is none.")
        ],
        cwd: Annotated[str | None, Field(description="Absolute directory to run in.")] = None,
        env: Annotated[dict[str, str] | None, Field(description="Environment variables to add.")] = None,
        stdin: Annotated[str | None, Field(description="All of its standard input.")] = None,
        timeout_seconds: Seconds = None,
        sandbox: Where = None,
    ) -> answers.CommandAnswer:
        """Run a shell command in an isolated sandbox. Files stay between calls; the shell's state does not."""
        connection = connection_of(ctx)
        bounds = connection.bounds
        limit = _limit(connection, timeout_seconds)
        name, box = await connection.sandbox(sandbox)
        async with _forgetting(connection, box), _ticking(ctx, limit), connection.turn:
            began = time.monotonic()
            process = box.exec(
                ["sh", "-c", _SHELL, command],
                cwd=cwd,
                env=env,
                stdin=False if stdin is None else stdin,
                timeout_seconds=limit,
                max_output_bytes=bounds.collected_bytes,
            )
            result, ended_by = await _ended(process)
        stdout, stdout_dropped = answers.cut(result.stdout_bytes, bounds.output_bytes)
        stderr, stderr_dropped = answers.cut(result.stderr_bytes, bounds.output_bytes)
        return answers.CommandAnswer(
            exit_code=result.returncode if ended_by == "itself" else None,
            stdout=stdout,
            stderr=stderr,
            ended_by=ended_by,
            stdout_dropped_bytes=stdout_dropped,
            stderr_dropped_bytes=stderr_dropped,
            seconds=round(time.monotonic() - began, 3),
            sandbox=name,
        )

    @tool("Run code", read_only_hint=False, destructive_hint=True, open_world_hint=True)
    async def run_code(
        ctx: Context[Any, Any],
        code: str,
        language: Annotated[
            str, Field(description="python, bash or javascript, where the image has it.")
        ] = "python",
        context: Annotated[str | None, Field(description="Variables are shared within a context.")] = None,
        timeout_seconds: Seconds = None,
        sandbox: Where = None,
    ) -> answers.CodeAnswer:
        """Run code in an interpreter that keeps its variables between calls. The last expression's value is a result."""
        connection = connection_of(ctx)
        bounds = connection.bounds
        limit = _limit(connection, timeout_seconds)
        name, box = await connection.sandbox(sandbox)
        async with _forgetting(connection, box), _ticking(ctx, limit), connection.turn:
            ran = await box.run_code(code, language=language, context=context, timeout_seconds=limit)
        stdout, stdout_dropped = answers.cut(ran.stdout.encode("utf-8", "replace"), bounds.output_bytes)
        stderr, stderr_dropped = answers.cut(ran.stderr.encode("utf-8", "replace"), bounds.output_bytes)
        results, results_dropped = answers.bundles(ran.results, max(bounds.output_bytes, 1 << 20))
        return answers.CodeAnswer(
            stdout=stdout,
            stderr=stderr,
            results=results,
            error=_said(ran.error, bounds.output_bytes),
            stdout_dropped_bytes=stdout_dropped,
            stderr_dropped_bytes=stderr_dropped,
            results_dropped=results_dropped,
            sandbox=name,
        )

    @tool("Make a sandbox", read_only_hint=False, destructive_hint=False, open_world_hint=False)
    async def sandbox_create(
        ctx: Context[Any, Any],
        image: Annotated[
            str | None, Field(description="An image that the server has or allows; left out: its default.")
        ] = None,
        env: Annotated[
            dict[str, str] | None, Field(description="Environment variables of all its commands.")
        ] = None,
        working_dir: Annotated[str | None, Field(description="Absolute; commands start in it.")] = None,
    ) -> answers.SandboxAnswer:
        """Make one more sandbox, for when one is not enough. It ends with this connection."""
        _refuse_directory(image)
        options = {"container_image": image, "environment_variables": env, "working_dir": working_dir}
        given = {key: value for key, value in options.items() if value is not None}
        name, box = await connection_of(ctx).create(given)
        return _shown(name, box, implicit=False)

    @tool("List sandboxes", read_only_hint=True, open_world_hint=False)
    async def sandbox_list(ctx: Context[Any, Any]) -> answers.SandboxesAnswer:
        """The sandboxes of this connection."""
        every = connection_of(ctx).all()
        for _, box, _ in every:
            with contextlib.suppress(LowtideError):
                await box.refresh()
        return answers.SandboxesAnswer(
            sandboxes=[_shown(name, box, implicit=implicit) for name, box, implicit in every]
        )

    @tool(
        "End a sandbox",
        read_only_hint=False,
        destructive_hint=True,
        idempotent_hint=True,
        open_world_hint=False,
    )
    async def sandbox_end(ctx: Context[Any, Any], sandbox: Where = None) -> answers.EndAnswer:
        """End a sandbox: its processes and files are gone. Everything ends with the connection anyway."""
        name, report = await connection_of(ctx).end(sandbox)
        return answers.EndAnswer(sandbox=name, outcome=str(report.outcome.value), why=report.why or "")

    @tool("Read a file", read_only_hint=True, open_world_hint=False)
    async def file_read(
        ctx: Context[Any, Any],
        path: str,
        offset: Annotated[int, Field(ge=0, description="The byte to begin at.")] = 0,
        max_bytes: Annotated[int | None, Field(gt=0, description="At most this much of it.")] = None,
        sandbox: Where = None,
    ) -> answers.FileAnswer:
        """Read a file, or a part of it. What is no UTF-8 comes as base64."""
        connection = connection_of(ctx)
        most = min(max_bytes or connection.bounds.output_bytes, connection.bounds.output_bytes)
        name, box = await connection.sandbox(sandbox)
        async with connection.turn, _forgetting(connection, box), _in_time(connection):
            part, size = await _part(box, path, offset, most)
        content, encoding, used = _text(part, ends_here=offset + len(part) >= size)
        return answers.FileAnswer(
            path=path,
            content=content,
            encoding=encoding,
            offset=offset,
            size=size,
            dropped_bytes=max(0, size - offset - used),
            sandbox=name,
        )

    @tool(
        "Write a file",
        read_only_hint=False,
        destructive_hint=True,
        idempotent_hint=True,
        open_world_hint=False,
    )
    async def file_write(
        ctx: Context[Any, Any],
        path: str,
        content: str,
        encoding: Annotated[str, Field(description="utf-8, or base64 for what is no text.")] = "utf-8",
        executable: bool = False,
        sandbox: Where = None,
    ) -> answers.WriteAnswer:
        """Write a file, whole, making its directories. An existing one is replaced."""
        data = _bytes(content, encoding)
        connection = connection_of(ctx)
        name, box = await connection.sandbox(sandbox)
        async with connection.turn, _forgetting(connection, box), _in_time(connection):
            await box.write_file(path, data, mode=0o755 if executable else None)
        return answers.WriteAnswer(path=path, bytes_written=len(data), sandbox=name)

    @tool("List a directory", read_only_hint=True, open_world_hint=False)
    async def file_list(
        ctx: Context[Any, Any], path: str = ".", sandbox: Where = None
    ) -> answers.DirectoryAnswer:
        """What a directory holds, sorted by name."""
        connection = connection_of(ctx)
        name, box = await connection.sandbox(sandbox)
        async with connection.turn, _forgetting(connection, box), _in_time(connection):
            found = await box.list_dir(path)
        shown = [
            answers.Entry(name=one.name, kind=str(one.kind.value), size=one.size)
            for one in found[:_DIRECTORY_ENTRIES]
        ]
        return answers.DirectoryAnswer(
            path=path, entries=shown, dropped_entries=len(found) - len(shown), sandbox=name
        )

    @tool("Address of a port", read_only_hint=True, open_world_hint=False)
    async def port_url(
        ctx: Context[Any, Any], port: Annotated[int, Field(ge=1, le=65535)], sandbox: Where = None
    ) -> answers.UrlAnswer:
        """The address under which a server that listens on this port of the sandbox is reached from outside."""
        connection = connection_of(ctx)
        name, box = await connection.sandbox(sandbox)
        connection.open_port(name, port)
        async with connection.turn, _forgetting(connection, box), _in_time(connection):
            at = await box.url(port)
        return answers.UrlAnswer(url=at.url, headers=dict(at.headers), sandbox=name)


def _told(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """An error of lowtide's is an answer for the model: it says what to do. Anything else is a fault of ours."""

    @wraps(call)
    async def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            answer: T = answers.sendable(await call(*args, **kwargs))
        except LowtideError as error:
            said = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
            raise ToolError(answers.cut(said, _ERROR_BYTES)[0]) from error
        return answer

    return told


@contextlib.asynccontextmanager
async def _forgetting(connection: Connection, box: Sandbox) -> Any:
    """Once a call has found its sandbox gone, the next one does not try it again."""
    try:
        yield
    except SandboxGone as error:
        connection.forget(box)
        said = f"SandboxGone: {error}. Its files are lost; a call that names no sandbox gets a new one"
        raise ToolError(answers.sendable(said)) from error


@contextlib.asynccontextmanager
async def _in_time(connection: Connection) -> Any:
    """What has no time limit of its own: a file may be of any size, and a sandbox may make it so."""
    limit = _limit(connection, None)
    with anyio.move_on_after(limit) as scope:
        yield
    if scope.cancelled_caught:
        raise ToolError(f"CommandTimeoutError: not done within {limit:g} seconds")


@contextlib.asynccontextmanager
async def _ticking(ctx: Context[Any, Any], limit: float) -> Any:
    """Tell a client that asked for progress that the call is still at work, once a second."""

    async def tick() -> None:
        began = time.monotonic()
        while True:
            await anyio.sleep(_TICK_SECONDS)
            so_far = round(time.monotonic() - began, 1)
            await ctx.report_progress(so_far, limit, f"running for {so_far:g} of at most {limit:g} seconds")

    problem: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        try:
            yield
        except Exception as error:  # kept out of the group, which would wrap it
            problem = error
        tasks.cancel_scope.cancel()
    if problem is not None:
        raise problem


async def _ended(process: Process) -> tuple[ProcessResult, str]:
    try:
        return await process, "itself"
    except CommandTimeoutError as error:
        result, ended_by = error.result, "timeout"
        if result is None:
            raise
    except OutputLimitError as error:
        result, ended_by = error.result, "output limit"
        if result is None:
            raise
    return result, ended_by


def _limit(connection: Connection, asked: float | None) -> float:
    bounds = connection.bounds
    if asked is None:
        return min(bounds.timeout_seconds, bounds.max_timeout_seconds)
    if asked > bounds.max_timeout_seconds:
        raise ValidationError(
            f"timeout_seconds may be at most {bounds.max_timeout_seconds:g} here", argument="timeout_seconds"
        )
    return asked


async def _part(box: Sandbox, path: str, offset: int, most: int) -> tuple[bytes, int]:
    """`most` bytes of the file from `offset` on, and its size. Read as a stream: it may be of any size."""
    part, seen = bytearray(), 0
    reader = box.read_file_streaming(path)
    try:
        async for chunk in reader:
            begin = max(0, offset - seen)
            seen += len(chunk)
            part += chunk[begin : begin + most - len(part)]
            if len(part) >= most:
                break
        else:
            return bytes(part), seen
    finally:
        reader.close()
    return bytes(part), max((await box.stat(path)).size, offset + len(part))


def _text(part: bytes, *, ends_here: bool) -> tuple[str, str, int]:
    """As text if it is UTF-8, without a character that the end of the part cuts in two; and how much that is."""
    for less in range(1 if ends_here else 4):
        used = len(part) - less
        with contextlib.suppress(UnicodeDecodeError):
            return part[:used].decode(), "utf-8", used
    return base64.b64encode(part).decode(), "base64", len(part)


def _bytes(content: str, encoding: str) -> bytes:
    if encoding == "utf-8":
        return content.encode("utf-8", "surrogatepass")
    if encoding != "base64":
        raise ValidationError("encoding must be utf-8 or base64", argument="encoding")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ValidationError(f"content is no base64: {error}", argument="content") from error


def _refuse_directory(image: str | None) -> None:
    """A local sandbox can run on a directory of this machine: that is for who starts the server to say, not for a client."""
    if image is not None and (image[:1] in "/.~" or "\\" in image or not image.strip()):
        raise ValidationError("image must be an image's name, and no directory", argument="image")


def _shown(name: str, box: Sandbox, *, implicit: bool) -> answers.SandboxAnswer:
    status = box.status
    return answers.SandboxAnswer(
        sandbox=name,
        provider=box.provider,
        status=str(status.value) if status else "pending",
        implicit=implicit,
    )


def _said(error: Any, most: int) -> str | None:
    if not error:
        return None
    lines = error.get("traceback") or f"{error.get('name')}: {error.get('value')}"
    text = "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)
    return answers.cut(text.encode("utf-8", "replace"), most)[0]
