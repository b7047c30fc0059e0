"""What the service tells by itself: sandbox events over Socket.IO, to whoever shows the key."""

from __future__ import annotations

import hmac
from typing import Any

import socketio  # type: ignore[import-untyped]
from aiohttp import web


class Events:
    """One Socket.IO server. Everybody with the key belongs to the one organization there is."""

    def __init__(self, app: web.Application, path: str, key: str) -> None:
        self._server = socketio.AsyncServer(async_mode="aiohttp")
        self._server.attach(app, socketio_path=path)

        async def connect(sid: str, environ: dict[str, Any], auth: Any = None) -> None:
            given = auth.get("token") if isinstance(auth, dict) else None
            if not isinstance(given, str) or not hmac.compare_digest(given.encode(), key.encode()):
                raise socketio.exceptions.ConnectionRefusedError("unauthorized")

        self._server.on("connect", connect)

    async def tell(self, event: str, data: dict[str, Any]) -> None:
        await self._server.emit(event, data)

    async def aclose(self) -> None:
        await self._server.shutdown()
