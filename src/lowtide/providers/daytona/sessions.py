"""The daemon's sessions of one sandbox: each runs one command at a time, and is used again when it is free.

A session costs a request to make and one to end, and holds its commands' logs on the sandbox's disk. So a
few are kept, and one with much in its logs is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.providers import hosted
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import status_of, translated, was_cut
from lowtide.providers.daytona.once import Calls

if TYPE_CHECKING:
    from daytona import AsyncSandbox

log = logging.getLogger("lowtide.daytona")

CALL_SECONDS = 30.0
START_SECONDS = 60.0
_LOST_SECONDS = 5.0
"""How long a command whose start was not answered may take to appear in its session."""
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
        self._ending: set[asyncio.Task[Any]] = set()

    async def take(self) -> Session:
        """One that is free. Raises what the SDK raises."""
        if not self._idle and self._ending:
            # One whose command has just ended is free in a moment, sooner than a new one is made.
            await asyncio.wait(self._ending, timeout=_SOON_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._idle:
            return self._idle.pop()
        return await self._make()

    async def begin(self, command: str) -> tuple[Session, str]:
        """A session with the command in it, once, and the command's id there."""
        box = self._box
        session = await self.take()
        try:
            return session, await self.begin_in(session, command)
        except Exception as error:
            found = translated(error, box.id)
            status = status_of(error)
            if found is None or not (was_cut(found) or status in (404, 409, 410)):
                self.end_soon(session)
                raise
            # Nobody knows whether it runs. The session does: it has the command, or it is ended, and
            # then a request that comes late finds nothing to start it in.
            known = None if status in (404, 410) else await self._appeared(session)
            if known is not None:
                log.info("sandbox %s: the answer to a start was lost; found the command again", box.id)
                session.commands.add(known)
                return session, known
            await self.end(session)
            session = await self.take()
            return session, await self.begin_in(session, command)
        except asyncio.CancelledError:
            self.end_soon(session)
            raise

    async def begin_in(self, session: Session, command: str) -> str:
        """Its id. Raises what the SDK raises."""
        from daytona import SessionExecuteRequest

        request = SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
        starting = self._box.process.execute_session_command(session.session_id, request)
        answer = await within(START_SECONDS, starting, "start a command", self._box.id)
        command_id = str(answer.cmd_id)
        session.commands.add(command_id)
        return command_id

    async def _appeared(self, session: Session) -> str | None:
        """The command that came into the session since; None when none does."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LOST_SECONDS
        delay = 0.05
        while True:
            looking = self._box.process.get_session(session.session_id)
            found = await within(CALL_SECONDS, looking, "look into a session", self._box.id)
            for command in found.commands or ():
                if str(command.id) not in session.commands:
                    return str(command.id)
            if loop.time() > deadline:
                return None
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)

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
        for task in list(self._ending):
            if not task.done():
                hosted.let_go(task)
