"""The daemon's sessions of one sandbox: each runs one command at a time, and is used again when it is free.

A session costs a request to make and one to end, and holds its commands' logs on the sandbox's disk. So a
few are kept, one is made beforehand, and one with much in its logs is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.providers.daytona.deadline import let_go, within
from lowtide.providers.daytona.once import Calls

if TYPE_CHECKING:
    from daytona import AsyncSandbox

CALL_SECONDS = 30.0
_SOON_SECONDS = 0.02
_MOST_IDLE = 8
_MOST_USES = 100
_MOST_LOGGED = 1 << 20


@dataclass(slots=True)
class Session:
    session_id: str
    commands: set[str] = field(default_factory=set)
    """The commands it has been given, so that a new one can be told from them."""
    logged: int = 0


class Sessions:
    """Those of one sandbox that this end has made."""

    def __init__(self, box: AsyncSandbox) -> None:
        self._box = box
        self.calls = Calls()
        self.has_perl = True
        """Until a command shows otherwise."""
        self._idle: list[Session] = []
        self._making: asyncio.Task[Session] | None = None
        self._ending: set[asyncio.Task[Any]] = set()

    def prepare(self) -> None:
        """Make one beforehand, for the first command."""
        if self._making is None and not self._idle:
            self._making = asyncio.ensure_future(self._make())
            self._making.add_done_callback(lambda made: made.cancelled() or made.exception())

    async def take(self) -> Session:
        """One that is free. Raises what the SDK raises."""
        if not self._idle and self._ending and self._making is None:
            # One whose command has just ended is free in a moment, sooner than a new one is made.
            await asyncio.wait(self._ending, timeout=_SOON_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._idle:
            return self._idle.pop()
        making, self._making = self._making, None
        if making is not None:
            with contextlib.suppress(Exception):
                return await making
        return await self._make()

    def give_back(self, session: Session, *, logged: int) -> None:
        """Its command has ended, and so has everything that held its streams."""
        session.logged += logged
        spent = session.logged > _MOST_LOGGED or len(session.commands) >= _MOST_USES
        if spent or len(self._idle) >= _MOST_IDLE:
            self.end_soon(session)
        else:
            self._idle.append(session)

    def end_soon(self, session: Session) -> None:
        self.watch(asyncio.ensure_future(self.end(session)))

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Work nobody waits for, until this end lets go."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def end(self, session: Session) -> None:
        """After this, nothing that is still on its way to the session can start in it."""
        with contextlib.suppress(Exception):
            deleting = self._box.process.delete_session(session.session_id, request_timeout=CALL_SECONDS)
            await within(CALL_SECONDS, deleting, "end a session", self._box.id)

    async def _make(self) -> Session:
        session_id = f"lowtide-{secrets.token_hex(8)}"
        making = self._box.process.create_session(session_id, request_timeout=CALL_SECONDS)
        await within(CALL_SECONDS, making, "make a session", self._box.id)
        return Session(session_id)

    def forget(self) -> None:
        """The sandbox is gone, or this end lets go of it."""
        self._idle.clear()
        for task in (self._making, *self._ending):
            if task is not None and not task.done():
                let_go(task)
        self._making = None
