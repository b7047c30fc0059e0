"""The guardian's end of the links: who owns, with which credentials; and the answer to how it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.lifecycle.guardian_link import MESSAGE_BYTES, DirectoryAddress, peer_uid, socket_name
from lowtide.lifecycle.guardian_workers import Credentials
from lowtide.lifecycle.owner import Owner

log = logging.getLogger("lowtide.guardian")


@dataclass(slots=True)
class Links:
    """Every owner that has come to the socket. A closed link means nothing by itself: an owner is watched anyway."""

    path: Path
    most: int
    """So many may stay; who comes after that is heard, told so and let go."""
    learn: Callable[[Credentials], None]
    came: Callable[[Owner], None]
    went: Callable[[Owner], Awaitable[None]]
    status: Callable[[], dict[str, Any]]
    _owners: dict[asyncio.StreamWriter, Owner | None] = field(default_factory=dict)
    _server: asyncio.Server | None = None

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._owners.values()

    async def open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / socket_name()).unlink()
        with DirectoryAddress(self.path) as address:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            door.bind(address)
        os.chmod(self.path / socket_name(), 0o600)
        door.listen(128)
        self._server = await asyncio.start_unix_server(self._serve, sock=door, limit=MESSAGE_BYTES)

    def close(self) -> None:
        """First the way in: an owner that comes now finds nobody and starts a new guardian."""
        (self.path / socket_name()).unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()
        for writer in list(self._owners):
            writer.close()

    def tell(self, message: dict[str, Any]) -> None:
        """Every owner that is linked."""
        for writer in list(self._owners):
            writer.write(json.dumps(message).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if peer_uid(writer.get_extra_info("socket")) != os.geteuid():
            writer.close()
            return
        full = len(self._owners) >= self.most
        self._owners[writer] = None
        owner: Owner | None = None
        try:
            while line := await reader.readline():
                message: dict[str, Any] = json.loads(line)
                if "status" in message:
                    writer.write(json.dumps(self.status()).encode() + b"\n")
                    continue
                owner = self._owners[writer] = Owner(**message["owner"])
                for known in message["providers"]:
                    self.learn(Credentials(**known))
                self.came(owner)
                if full:
                    writer.write(b'{"full": true}\n')
                    await writer.drain()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a link broke: %s", error)
        finally:
            self._owners.pop(writer, None)
            writer.close()
        if owner is not None:
            await self.went(owner)
