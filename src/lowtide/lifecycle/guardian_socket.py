"""The guardian's end of its socket: owners with their credentials, workers, and the question how it is."""

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

from lowtide.lifecycle.guardian_link import (
    MESSAGE_BYTES,
    PROTOCOL,
    DirectoryAddress,
    peer_uid,
    socket_name,
)
from lowtide.lifecycle.guardian_workers import Credentials, Start
from lowtide.lifecycle.owner import Owner

log = logging.getLogger("lowtide.guardian")


@dataclass(slots=True)
class Links:
    """Every owner that has come to the socket. A closed link means nothing by itself: an owner is watched anyway."""

    path: Path
    most: int
    """So many may stay; who comes after that is heard, told so and let go."""
    learn: Callable[[Credentials, Start], None]
    came: Callable[[Owner], None]
    worker: Callable[[dict[str, Any], asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    """Serves a worker's connection until it is closed."""
    went: Callable[[Owner], Awaitable[None]]
    status: Callable[[], dict[str, Any]]
    _owners: dict[asyncio.StreamWriter, Owner | None] = field(default_factory=dict)
    _server: asyncio.Server | None = None

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._owners.values()

    async def open(self) -> None:
        """Listen. Again, where the directory was removed and made again: the links that there are stay."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(FileNotFoundError):
            (self.path / socket_name()).unlink()
        with DirectoryAddress(self.path) as address:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            door.bind(address)
        os.chmod(self.path / socket_name(), 0o600)
        door.listen(128)
        self._server = await asyncio.start_unix_server(self._serve, sock=door, limit=MESSAGE_BYTES)

    def has_entrance(self) -> bool:
        """Whether there is a socket in the directory, this guardian's or another one's."""
        return os.path.lexists(self.path / socket_name())

    def close(self) -> None:
        """First the way in: an owner that comes now finds nobody and starts a new guardian."""
        with contextlib.suppress(OSError):  # the directory is gone, or out of reach
            (self.path / socket_name()).unlink()
        if self._server is not None:
            self._server.close()
        for writer in list(self._owners):
            writer.close()

    def tell(self, message: dict[str, Any]) -> None:
        """Every owner that is linked."""
        for writer in list(self._owners):
            _write(writer, message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if peer_uid(writer.get_extra_info("socket")) != os.geteuid():
            writer.close()
            return
        full = len(self._owners) >= self.most
        self._owners[writer] = None
        owner: Owner | None = None
        start = Start(tell=lambda message: _write(writer, message))
        try:
            while line := await reader.readline():
                message: dict[str, Any] = json.loads(line)
                if "status" in message:
                    _write(writer, self.status())
                    continue
                if message.get("protocol") != PROTOCOL:
                    _write(writer, {"refused": _other_protocol(message.get("protocol"))})
                    await writer.drain()
                    break
                if "worker" in message:
                    del self._owners[writer]
                    await self.worker(message["worker"], reader, writer)
                    break
                owner = self._owners[writer] = Owner(**message["owner"])
                if "start" in message:
                    start = Start.of(message["start"], start.tell)
                if "started" in message:
                    start.started.add((message["started"]["name"], message["started"]["account"]))
                for known in message["providers"]:
                    self.learn(Credentials(**known), start)
                self.came(owner)
                if full:
                    writer.write(b'{"full": true}\n')
                    await writer.drain()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a link broke: %s", error)
        finally:
            start.closed = True
            self._owners.pop(writer, None)
            writer.close()
        if owner is not None:
            await self.went(owner)


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def _other_protocol(theirs: object) -> str:
    return (
        f"it speaks protocol {PROTOCOL} and was addressed in protocol {theirs}: two versions of lowtide share a state "
        "directory. Use one version, or another LOWTIDE_HOME"
    )
