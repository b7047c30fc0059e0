"""Commands that are waited for: execute and code-run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused, body_of, strings_of, text_of, whole_of
from lowtide.emulators.daytona.machine import feed
from lowtide.emulators.daytona.sandbox import Sandbox
from lowtide.emulators.faults import FaultName
from lowtide.providers.base import ProcessHandle

if TYPE_CHECKING:
    from lowtide.emulators.daytona.toolbox import Toolbox

_MERGED = 'exec 2>&1 && exec "$@"'
_RUNNERS = {"python": ("python3", "-"), "javascript": ("node", "-"), "typescript": ("npx", "ts-node", "-T")}
_LARGEST_RESULT = 64 << 20


class Commands:
    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.machine = toolbox.sandboxes.machine

    def add_calls(self, add: Callable[..., None]) -> None:
        add("POST", "/process/execute", self.execute)
        add("POST", "/process/code-run", self.code_run)

    async def execute(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        body = await body_of(request)
        command = text_of(body, "command")
        timeout = whole_of(body.get("timeout"), "timeout")
        handle = await self.machine.start(
            sandbox,
            ("/bin/sh", "-c", _MERGED, "sh", "/bin/bash", "-c", command),
            cwd=body.get("cwd"),
            environment=strings_of(body.get("envs"), "envs"),
        )
        code, result = await self._finish(request, sandbox, "execute", handle, timeout)
        return web.json_response({"exitCode": code, "result": result})

    async def code_run(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        body = await body_of(request)
        code = body.get("code")
        if not isinstance(code, str):
            raise Refused(400, "code is required", code="INVALID_REQUEST_BODY")
        language = str(body.get("language") or "python")
        if language not in _RUNNERS:
            raise Refused(400, f"unsupported language: {language}")
        arguments = tuple(map(str, body.get("argv") or ()))
        handle = await self.machine.start(
            sandbox,
            ("/bin/sh", "-c", _MERGED, "sh", *_RUNNERS[language], *arguments),
            environment=strings_of(body.get("envs"), "envs"),
            stdin=True,
        )
        feeding = asyncio.ensure_future(feed(handle, code.encode()))
        try:
            status, result = await self._finish(
                request, sandbox, "code-run", handle, whole_of(body.get("timeout"), "timeout")
            )
        finally:
            feeding.cancel()
        answer = {"exitCode": status, "result": result, "artifacts": {"charts": []}}
        return web.json_response(answer)

    async def _finish(
        self,
        request: web.Request,
        sandbox: Sandbox,
        operation: str,
        handle: ProcessHandle,
        timeout: int | None,
    ) -> tuple[int, str]:
        """Wait for it. A caller that leaves does not end it: the daemon goes on, and so does this."""
        doing = asyncio.ensure_future(_collect(handle, timeout or None))
        doing.add_done_callback(lambda done: done.cancelled() or done.exception())
        facts = {**sandbox.facts, "operation": operation}
        faults = self.toolbox.ground.faults
        if fault := faults.take(FaultName.GONE_MID_COMMAND, "daytona", facts):
            self.toolbox.vanish(sandbox, fault.seconds or 0.5)
        if fault := faults.take(FaultName.EXEC_DROPPED, "daytona", facts):
            await asyncio.sleep(fault.seconds or 0.0)
            hang_up(request)
            raise asyncio.CancelledError
        cut = asyncio.ensure_future(sandbox.cut.wait())
        try:
            await asyncio.wait({doing, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise Refused(502, "the sandbox has ended")
            return doing.result()
        finally:
            cut.cancel()


def hang_up(request: web.Request) -> None:
    """Close the connection without an answer, as a proxy between does: the SDK sends some calls again then."""
    if request.transport is not None:
        request.transport.close()


async def _collect(handle: ProcessHandle, timeout: int | None) -> tuple[int, str]:
    printed = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for _, data in handle.output():
                if len(printed) < _LARGEST_RESULT:
                    printed += data
            code = await handle.wait()
    except TimeoutError:
        await handle.terminate(0.0)
        message = f"command execution timeout: it took longer than {timeout} seconds"
        raise Refused(408, message, code="PROCESS_EXECUTION_TIMEOUT") from None
    finally:
        await handle.aclose()
    return code, printed.decode("utf-8", "replace")
