"""One command that envd runs in the sandbox, and who listens to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Any

from lowtide.emulators.e2b.connect import RpcError
from lowtide.errors import LowtideError
from lowtide.providers.base import STDERR, ProcessHandle

SIGNALS = {"SIGNAL_SIGTERM": ("TERM", 15), "SIGNAL_SIGKILL": ("KILL", 9)}
_LOUDEST = {"TERM": "terminated", "KILL": "killed"}


class GuestProcess:
    """One command that envd started. Output goes to whoever listens at the time, and else nowhere."""

    def __init__(
        self, handle: ProcessHandle, config: dict[str, Any], tag: str | None, user: str, tty: bool
    ) -> None:
        self.handle = handle
        self.config = config
        self.tag = tag
        self.user = user
        self.tty = tty
        self.pid = 0
        self.end: dict[str, Any] | None = None
        self.signalled: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self._listeners: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self._known = asyncio.get_running_loop().create_future()
        self._pump = asyncio.create_task(self._run())
        self.on_end: Any = None

    async def started(self) -> int:
        """The pid inside the sandbox."""
        self.pid = await asyncio.shield(self._known)
        return self.pid

    def listen(self) -> asyncio.Queue[dict[str, Any] | None]:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(64)
        self._listeners.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        self._listeners.discard(queue)
        while not queue.empty():  # a pump waiting for room goes on
            queue.get_nowait()

    async def _run(self) -> None:
        try:
            first: bytes | None = b""
            async for stream, data in self.handle.output():
                if first is not None and stream != STDERR:
                    first += data
                    line, newline, data = first.partition(b"\n")
                    if not newline:
                        continue
                    first = None
                    if not self._known.done():
                        self._known.set_result(int(line) if line.strip().isdigit() else 0)
                if data:
                    name = "pty" if self.tty else "stderr" if stream == STDERR else "stdout"
                    text = base64.b64encode(data).decode()
                    await self._tell({"event": {"data": {name: text}}})
            self.end = self._ended(await self.handle.wait())
        except LowtideError as error:
            self.end = {"exitCode": -1, "exited": False, "status": "lost", "error": str(error)}
        finally:
            if not self._known.done():
                self._known.set_exception(RpcError("internal", "the command could not be started"))
                self._known.exception()
            if self.timer is not None:
                self.timer.cancel()
            if self.on_end is not None and self.end is not None:
                self.on_end(self)
        for queue in list(self._listeners):
            await queue.put(None)
        await self.handle.aclose()

    async def _tell(self, event: dict[str, Any]) -> None:
        for queue in list(self._listeners):
            while queue in self._listeners:
                if not queue.full():
                    queue.put_nowait(event)
                    break
                try:
                    async with asyncio.timeout(1):
                        await queue.put(event)
                    break
                except TimeoutError:
                    continue

    def _ended(self, code: int) -> dict[str, Any]:
        for name, number in SIGNALS.values():
            if name in self.signalled and code == 128 + number:
                status = f"signal: {_LOUDEST[name]}"
                return {"exitCode": -1, "exited": False, "status": status, "error": status}
        ended: dict[str, Any] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
        if code:
            ended["error"] = ended["status"]
        return ended

    async def aclose(self) -> None:
        self._pump.cancel()
        if self.timer is not None:
            self.timer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump
        await self.handle.aclose()
