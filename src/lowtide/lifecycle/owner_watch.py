"""Watching owners until they are gone: by pidfd where there is one to have, by looking again where not."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection

from lowtide.lifecycle.owner import Owner, Standing, Verdict

log = logging.getLogger("lowtide.guardian")

POLL_SECONDS = 0.5


class OwnerWatch:
    """Tells `died` of each owner once its death is proven. Anything else is looked at again."""

    def __init__(self, died: Callable[[Owner, str], None], *, descriptors: int) -> None:
        self._died = died
        self._most = descriptors
        self._pidfds: dict[Owner, int] = {}
        self._polled: set[Owner] = set()
        self._dead: set[Owner] = set()
        self._polling: asyncio.Task[None] | None = None
        self._said: set[str] = set()

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._pidfds or owner in self._polled

    def __len__(self) -> int:
        return len(self._pidfds) + len(self._polled)

    def owners(self) -> list[Owner]:
        return [*self._pidfds, *self._polled]

    def look(self, owner: Owner) -> Verdict:
        """How it stands; from now on watched while it lives, or while that cannot be told for now."""
        verdict = owner.verdict()
        if verdict.standing is Standing.DEAD:
            if owner not in self._dead:
                self._gone(owner, verdict.why)
        elif owner.here and owner not in self:
            if verdict.standing is Standing.UNKNOWN:
                self._say_once(verdict.why)
            if not self._open(owner):
                self._poll(owner)
        return verdict

    def close(self) -> None:
        for owner in self.owners():
            self._forget(owner)

    def _open(self, owner: Owner) -> bool:
        if len(self._pidfds) >= self._most:
            self._say_once(f"no descriptor to spare for more than {self._most} owners: looking at the others")
            return False
        try:
            fd = os.pidfd_open(owner.pid)
        except (OSError, AttributeError) as error:
            # Whatever this is, it is no proof that the owner is dead: the next look finds out.
            self._say_once(
                f"no pidfd to be had ({error}): looking at owners every {POLL_SECONDS:g} s instead"
            )
            return False
        if owner.verdict().standing is not Standing.ALIVE:  # the pid may have been reused in between
            os.close(fd)
            return False
        self._pidfds[owner] = fd
        asyncio.get_running_loop().add_reader(fd, self._gone, owner, "it has ended")
        return True

    def _poll(self, owner: Owner) -> None:
        self._polled.add(owner)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.ensure_future(self._look_again())

    async def _look_again(self) -> None:
        while self._polled:
            await asyncio.sleep(POLL_SECONDS)
            for owner in list(self._polled):
                self.look(owner)

    def only(self, owners: Collection[Owner]) -> None:
        """Forget the dead that have nothing left."""
        self._dead &= set(owners)

    def _gone(self, owner: Owner, why: str) -> None:
        self._forget(owner)
        self._dead.add(owner)
        self._died(owner, why)

    def _forget(self, owner: Owner) -> None:
        self._polled.discard(owner)
        fd = self._pidfds.pop(owner, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _say_once(self, text: str) -> None:
        if text not in self._said and len(self._said) < 100:
            self._said.add(text)
            log.warning("%s", text)
