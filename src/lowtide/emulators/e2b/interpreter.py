"""The code interpreter on port 49999: started inside the sandbox, kept running, and waited for."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError
from lowtide.providers.base import STDOUT

if TYPE_CHECKING:
    from lowtide.emulators.e2b.model import Sandbox
    from lowtide.emulators.e2b.sandboxes import Sandboxes
    from lowtide.emulators.ground import Ground

PORT = 49999
_SOURCES = Path(__file__).parents[1] / "interpreter"


def available() -> bool:
    """Whether this Python, which the sandbox sees, has what the kernels need."""
    return all(importlib.util.find_spec(name) for name in ("ipykernel", "jupyter_client"))


@cache
def _source(name: str) -> str:
    return (_SOURCES / f"{name}.py").read_text()


class Interpreter:
    """The server in one sandbox. When it dies it is started again, as a service would be."""

    def __init__(self, ground: Ground, sandboxes: Sandboxes, sandbox: Sandbox) -> None:
        self._ground = ground
        self._sandboxes = sandboxes
        self._sandbox = sandbox
        self._ready = asyncio.Event()
        self._running = asyncio.create_task(self._run())

    async def ready(self) -> bool:
        """Wait until it listens. False when the sandbox ended first, or it does not come up."""
        if self._ready.is_set():
            return True
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self._sandbox.cut)]
        try:
            await asyncio.wait(waits, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._ready.is_set() and not self._sandbox.cut.is_set()

    async def _run(self) -> None:
        with contextlib.suppress(LowtideError):
            while True:
                await self._once()
                self._ready.clear()
                await asyncio.sleep(0.1)

    async def _once(self) -> None:
        sandbox = self._sandbox
        environment = {
            "HOME": "/home/user",
            "USER": "user",
            "E2B_SANDBOX": "true",
            "E2B_SANDBOX_ID": sandbox.sandbox_id,
        }
        handle = await self._ground.backing.start(
            sandbox.backing,
            (sys.executable, "-I", "-c", _source("inside")),
            user=self._sandboxes.account("user"),
            cwd="/home/user",
            environment=environment,
            stdin=True,
        )
        try:
            configuration = {
                "port": PORT,
                "home": "/home/user",
                "environment": sandbox.environment,
                "startup": _source("startup"),
                "javascript": _source("javascript"),
                "java": _source("java"),
            }
            await handle.write_stdin(json.dumps(configuration).encode() + b"\n")
            async for stream, data in handle.output():
                if stream == STDOUT and b"ready" in data:
                    self._ready.set()
            await handle.wait()
        except BrokenPipeError:
            pass
        finally:
            await handle.aclose()

    async def aclose(self) -> None:
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
