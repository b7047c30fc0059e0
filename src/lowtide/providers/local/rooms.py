"""Rooms: a sandbox like the last ones, made in a quiet moment, so that the next one only has to move in.

A room has no name and no lease. Its first process holds one end of a connection whose other end only this
process holds, and ends when that is closed: with this process, however it ends, the room goes. What is left
then is a directory, which the next process of this home, or the guardian, removes (`rooms_on_disk`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from dataclasses import replace

from lowtide import engine, threads
from lowtide.errors import LowtideError
from lowtide.providers.base import Labels
from lowtide.providers.local import destroy, rooms_on_disk
from lowtide.providers.local.create import Launch, Room
from lowtide.providers.local.enter import command_starter_message
from lowtide.providers.local.prerequisites import Prerequisites
from lowtide.providers.local.sandbox_directory import SandboxDirectory
from lowtide.trees.passable import make_passable

_all: weakref.WeakSet[Rooms] = weakref.WeakSet()


class Rooms:
    """At most one room, for sandboxes like the last two that were made."""

    def __init__(self, prerequisites: Prerequisites) -> None:
        self._prerequisites = prerequisites
        self._last: Launch | None = None
        self._again = False
        self._room: Room | None = None
        self._making: asyncio.Task[None] | None = None
        self._awaited = False
        self._leaving: set[asyncio.Future[bool]] = set()
        _all.add(self)

    async def take(self, launch: Launch) -> Room | None:
        """The room, when there is one of this shape or soon will be."""
        shape, last = launch.shape, self._last
        self._again = shape is not None and last is not None and last.shape == shape
        self._last = launch
        if shape is None or not self._again:
            return None
        if self._making is not None and not self._awaited:
            self._awaited = True
            try:
                await asyncio.wait([self._making])
            finally:
                self._awaited = False
        room = self._room
        if room is None or room.shape != shape:
            return None
        self._room = None
        if room.inner.alive():
            return room
        self._discard(room)
        return None

    def prepare(self) -> bool:
        """Begin to make one. False: what was made last is like no other, or was the first of its kind."""
        if not self._again or self._last is None:
            return False
        shape = self._last.shape
        if self._making is None and (self._room is None or self._room.shape != shape):
            room, self._room = self._room, None
            if room is not None:
                self._discard(room)
            self._making = asyncio.ensure_future(self._make(self._last))
            self._making.add_done_callback(self._made)
        return True

    def _made(self, making: asyncio.Task[None]) -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # no room then: the next create makes its sandbox itself, and says what is wrong

    async def _make(self, like: Launch) -> None:
        shape = like.shape
        assert shape is not None
        directory = SandboxDirectory(rooms_on_disk.own(self._prerequisites.home) / os.urandom(8).hex())
        spec = replace(like.spec, labels=Labels(lease_id=directory.sandbox_id, ledger_id="", owner=""))
        launch = Launch(self._prerequisites, like.client, directory, spec, like.base_layers)
        near, far = threads.socketpair()
        try:
            if not directory.path.parent.exists():
                await asyncio.to_thread(rooms_on_disk.sweep, self._prerequisites.home)
            # Here and not in the thread, which goes on when this is cancelled.
            for path in (directory.path.parent.parent, directory.path.parent):
                make_passable(path)  # as the directory of the sandboxes is
            launch.reserve()
            launch.furnish()
            inner = await launch.run(leash=(os.dup(near.fileno()), far.detach()))
            room = Room(shape=shape, directory=directory, inner=inner, leash=near)
        except BaseException:
            near.close()
            far.close()
            self._put_away(directory)
            raise
        if self._prerequisites.client is not like.client:  # closed meanwhile
            self._discard(room)
            return
        self._room = room
        await self._open_door(room, like)

    async def _open_door(self, room: Room, like: Launch) -> None:
        """Have a command starter at its door, so that the first command is as fast as the others."""
        pidfd = room.inner.open()
        if self._prerequisites.owner is None or pidfd is None:
            return
        try:
            message = command_starter_message(self._prerequisites, network=like.network, pids=None)
            command_starter = await like.client.command_starter(message, pidfd)
        except (OSError, LowtideError):
            return
        finally:
            os.close(pidfd)
        if self._room is room:
            room.command_starter = command_starter
        else:
            command_starter.close()  # somebody was faster, and has one of its own

    def _discard(self, room: Room) -> None:
        room.close()
        self._put_away(room.directory)

    def _put_away(self, directory: SandboxDirectory) -> None:
        trash = self._prerequisites.home / "trash"
        removing = asyncio.get_running_loop().run_in_executor(None, destroy.destroy, directory, trash, 0.0)
        self._leaving.add(removing)
        removing.add_done_callback(self._leaving.discard)

    async def aclose(self) -> None:
        self._last, self._again = None, False
        making = self._making
        if making is not None:
            making.cancel()
            await asyncio.wait([making])
        room, self._room = self._room, None
        if room is not None:
            self._discard(room)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        with contextlib.suppress(OSError):
            os.rmdir(rooms_on_disk.own(self._prerequisites.home))

    def close_at_exit(self) -> None:
        self._last, self._again = None, False  # the loop still runs, and would make the next one
        room, self._room = self._room, None
        if room is not None:
            room.close()
            with contextlib.suppress(OSError, LowtideError):
                destroy.destroy(room.directory, self._prerequisites.home / "trash", 0.0)
            with contextlib.suppress(OSError):
                os.rmdir(room.directory.path.parent)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        room, self._room = self._room, None
        self._last, self._again, self._making = None, False, None
        if room is not None:
            room.close()


def _forget_all() -> None:
    for rooms in list(_all):
        rooms.forget()


def _close_all() -> None:
    """At the interpreter's end, when no loop may run any more."""
    for rooms in list(_all):
        rooms.close_at_exit()


engine.forget_in_child(_forget_all)
atexit.register(_close_all)
