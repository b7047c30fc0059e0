"""The code interpreter on port 49999."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from lowtide.emulators.e2b.sandboxes import Sandbox

if TYPE_CHECKING:
    from lowtide.emulators.e2b import E2BEmulator


class InterpreterService:
    def __init__(self, emulator: E2BEmulator) -> None:
        self.emulator = emulator

    async def call(self, request: web.Request, sandbox: Sandbox) -> web.StreamResponse:
        return web.json_response({"message": "port is not open"}, status=502)
