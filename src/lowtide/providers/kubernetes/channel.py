"""The way into a pod: an exec of the program inside, over a websocket, that hands its streams to PID 1."""

from __future__ import annotations

import contextlib
import json

import aiohttp

from lowtide import errors
from lowtide.in_background import in_background
from lowtide.providers.kubernetes import pod as objects
from lowtide.providers.kubernetes.ended import explain
from lowtide.providers.kubernetes.errors import SERVICE, ApiError, mapped
from lowtide.providers.kubernetes.lookup import Lookup

_PROTOCOL = "v4.channel.k8s.io"
_STDIN, _STDOUT = b"\0", b"\1"
"""The first byte of a message; all others are standard error and the end's status."""
_MESSAGE_BYTES = 256 << 10
# Load balancers drop silent connections after a minute or more; one that died without a word is noticed
# by the answer that does not come, and is opened anew.
_HEARTBEAT_SECONDS = 30.0


class ExecChannel:
    """Implements `inside.Channel`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, lookup: Lookup, sandbox_id: str) -> None:
        self._socket, self._lookup, self._sandbox_id = socket, lookup, sandbox_id
        self._heard = False
        self._said = b""

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), _MESSAGE_BYTES):
            await self._socket.send_bytes(_STDIN + data[at : at + _MESSAGE_BYTES])

    async def receive(self) -> bytes:
        while True:
            message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                break
            stream, data = message.data[:1], message.data[1:]
            if not data:
                continue  # each stream begins with an empty message
            if stream == _STDOUT:
                self._heard = True
                return bytes(data)
            self._said = (self._said + data)[:2000]
        if not self._heard and (error := await self._refusal()) is not None:
            raise error
        return b""

    def close(self) -> None:
        in_background(self._socket.close(), silent=True)

    async def _refusal(self) -> errors.LowtideError | None:
        """It ended before the program said anything: the sandbox has, or nothing could be started in it."""
        gone = await explain(self._lookup, self._sandbox_id)
        if gone is not None or not self._said:
            return gone
        words = self._said.decode("utf-8", "replace").strip()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            words = str(json.loads(words)["message"])
        words = f"nothing could be started in the sandbox: {words[:400]}"
        return SERVICE.error(errors.ResourceExhaustedError, words, self._sandbox_id)


async def open_channel(lookup: Lookup, sandbox_id: str, first: bytes) -> ExecChannel:
    """As the sandbox's own user: an exec of Kubernetes has no other. The program guards itself (docs/inside.md)."""
    namespace, name = lookup.split(sandbox_id)
    query = [("container", objects.CONTAINER), ("command", objects.PROGRAM), ("command", "attach")]
    query += [(stream, "true") for stream in ("stdin", "stdout", "stderr")]
    with mapped(sandbox_id):
        try:
            socket = await lookup.api.websocket(
                f"{objects.pods(namespace)}/{name}/exec",
                params=query,
                protocol=_PROTOCOL,
                heartbeat=_HEARTBEAT_SECONDS,
            )
        except ApiError as error:
            if (
                error.status in (400, 404, 500, 502)
                and (gone := await explain(lookup, sandbox_id)) is not None
            ):
                raise gone from error
            raise
        channel = ExecChannel(socket, lookup, sandbox_id)
        try:
            await channel.send(first)
        except BaseException:
            channel.close()
            raise
    return channel
