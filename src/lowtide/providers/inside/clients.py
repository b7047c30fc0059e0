"""The clients of one provider: one for each sandbox, made when it is first used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lowtide.providers.inside.channel import Channel
from lowtide.providers.inside.client import Client
from lowtide.providers.inside.link import BOUND_SECONDS


class Clients:
    """One per provider. Another event loop, or a forked child, gets clients of its own."""

    def __init__(
        self,
        provider: str,
        open_channel: Callable[[str, bytes], Awaitable[Channel]],
        key: Callable[[str], Awaitable[bytes]],
        *,
        text: bool = False,
        bound_seconds: float = BOUND_SECONDS,
        most: int | None = None,
    ) -> None:
        """`most`: where a service or its SDK bounds the connections. Then whoever is idle for longest lets go of his."""
        self._provider, self._open_channel, self._key, self._text = provider, open_channel, key, text
        self._bound_seconds, self._most = bound_seconds, most
        self._clients: dict[str, Client] = {}
        self._ending: list[Client] = []
        """Of sandboxes that are ending, while a command still waits to hear of it."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, sandbox_id: str) -> Client:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._clients, self._ending = loop, {}, []
        client = self._clients.get(sandbox_id)
        if client is None or not client.alive:
            key = await self._key(sandbox_id)
            client = self._clients.get(sandbox_id)  # somebody else may have asked meanwhile
            if client is None or not client.alive:
                self._let_go()
                client = self._clients[sandbox_id] = Client(
                    lambda first: self._open_channel(sandbox_id, first),
                    key=key,
                    provider=self._provider,
                    sandbox_id=sandbox_id,
                    text=self._text,
                    bound_seconds=self._bound_seconds,
                )
        if self._most is not None:
            self._clients[sandbox_id] = self._clients.pop(sandbox_id)  # the last used comes last
        return client

    def _let_go(self) -> None:
        if self._most is not None and len(self._clients) >= self._most:
            idle = next((key for key, client in self._clients.items() if client.idle), None)
            if idle is not None:
                self._clients.pop(idle).close()

    def known(self, sandbox_id: str) -> Client | None:
        """The one that is used here already."""
        client = self._clients.get(sandbox_id) if self._loop is asyncio.get_running_loop() else None
        return client if client is not None and client.alive else None

    def forget(self, sandbox_id: str, *, goodbye: bool = True) -> None:
        """It is ending: its channel breaks with it, and tells its commands then. Without any, it is closed now.

        `goodbye`: where the channel's other end has to be told, though its sandbox is ending.
        """
        client = self.known(sandbox_id)
        self._clients.pop(sandbox_id, None)
        self._ending = [one for one in self._ending if one.alive]
        if client is not None and client.idle:
            client.close(goodbye=goodbye)
        elif client is not None:
            self._ending.append(client)

    def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            for client in (*self._clients.values(), *self._ending):
                client.close()
        self._clients.clear()
        self._ending.clear()
