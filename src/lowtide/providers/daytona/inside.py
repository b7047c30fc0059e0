"""What runs in a sandbox beside a command: signals, the end of its tree; and what errors from there mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers import tagged
from lowtide.providers.daytona import script
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import translated, was_cut
from lowtide.providers.daytona.sessions import CALL_SECONDS

if TYPE_CHECKING:
    from daytona import AsyncSandbox

Explain = Callable[[errors.LowtideError], Awaitable[errors.LowtideError]]
"""What an error of the way to the sandbox really means: mostly that the sandbox is gone."""


class Inside:
    """Scripts of ours beside a command: signals and the end of its tree."""

    def __init__(self, box: AsyncSandbox, tag: int, explain: Explain) -> None:
        self._box, self._tag, self._explain = box, tag, explain

    async def signal(self, leader: int, number: int) -> None:
        await self._run(script.signal(leader, number, self._tag))

    async def terminate(self, grace_seconds: float) -> None:
        # Also after the command's own end: what it left running is part of its tree.
        if await self._run(tagged.terminate(self._tag, grace_seconds), grace_seconds):
            raise errors.SandboxUnavailableError(
                "some processes of the command could not be killed",
                provider="daytona",
                sandbox_id=self._box.id,
            )

    async def _run(self, text: str, seconds: float = 0.0) -> int:
        """One that is gone has nothing left to signal. A repeated script does no harm."""
        delay = 0.1
        while True:
            try:
                running = self._box.process.exec(script.alone(text))
                ran = await within(seconds + CALL_SECONDS, running, "a signal", self._box.id)
                return int(ran.exit_code)
            except Exception as error:
                meant = await meaning(error, self._box, self._explain)
                if isinstance(meant, errors.SandboxGone | errors.SandboxNotFoundError):
                    return 0
                if not was_cut(meant) or delay > 1.0:
                    raise meant from error
            await asyncio.sleep(delay)
            delay *= 2


async def meaning(error: BaseException, box: AsyncSandbox, explain: Explain) -> errors.LowtideError:
    found = translated(error, box.id)
    if found is None:
        found = errors.SandboxError(f"{type(error).__name__}: {error}", provider="daytona", sandbox_id=box.id)
    if found is not error:
        found.__cause__ = error
    return await explain(found)
