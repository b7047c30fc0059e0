"""Ports: a listener on this machine's loopback for one port of one pod, over the port-forward API."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import aiohttp

from lowtide.providers.kubernetes.api import Api
from lowtide.providers.kubernetes.failures import ApiError

log = logging.getLogger("lowtide.kubernetes")

_DATA, _ERROR = 0, 1
_PROTOCOL = "v4.channel.k8s.io"
_READ_BYTES = 64 << 10


class Forward:
    """Accepts on 127.0.0.1 and opens one websocket per connection: the protocol carries one stream per port."""

    def __init__(self, api: Api, pod_path: str, port: int) -> None:
        self._api, self._path, self._port = api, f"{pod_path}/portforward", port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            socket = await self._api.websocket(
                self._path, params=[("ports", str(self._port))], protocols=(_PROTOCOL,)
            )
        except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("port %s of %s: %s", self._port, self._path, error)
            writer.transport.abort()
            return
        upward = asyncio.get_running_loop().create_task(self._up(reader, socket))
        try:
            await self._down(socket, writer)
        finally:
            upward.cancel()
            with contextlib.suppress(Exception):
                await socket.close()
            writer.close()
            with contextlib.suppress(Exception):
                await writer.wait_closed()

    async def _up(self, reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
        # A half-close cannot be said in this protocol: the connection stays until the pod's side ends.
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, RuntimeError):
            while data := await reader.read(_READ_BYTES):
                await socket.send_bytes(bytes([_DATA]) + data)

    async def _down(self, socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
        announced: set[int] = set()  # the first message of each channel is the port number
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel not in announced:
                announced.add(channel)
                data = data[2:]
            if not data:
                continue
            if channel == _DATA:
                writer.write(data)
                try:
                    await writer.drain()
                except ConnectionError:
                    return
            elif channel == _ERROR:
                log.info(
                    "port %s of %s: %s", self._port, self._path, data.decode(errors="replace").strip()[:300]
                )
                return
