"""The sandboxes this end has had to do with: the SDK's object of each, and what is known of its inside."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers.base import SandboxState
from lowtide.providers.daytona import creation, looking
from lowtide.providers.daytona.client import Client
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import PROVIDER, mapped

if TYPE_CHECKING:
    from daytona import AsyncSandbox

    from lowtide.providers.daytona.sessions import Sessions

_KNOWN = 2048


@dataclass(slots=True)
class Box:
    """What commands in one sandbox need: the SDK's object, its sessions, and where commands start."""

    sdk: AsyncSandbox
    sessions: Sessions
    working_dir: str | None = None


class Boxes:
    """Looked up once, and forgotten when one has ended or stopped."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: OrderedDict[str, Box] = OrderedDict()

    async def get(self, sandbox_id: str, *, anew: bool = False) -> Box:
        """SandboxNotFoundError when there is none."""
        known = self._known.get(sandbox_id)
        if known is not None and not anew:
            return known
        sdk = await self._client.sdk()
        if not looking.is_name(sandbox_id):
            raise errors.SandboxNotFoundError(f"no sandbox {sandbox_id}", provider=PROVIDER)
        with mapped(sandbox_id):
            found = await within(looking.CALL_SECONDS, sdk.get(sandbox_id), "get", sandbox_id)
        return self.remember(found, (found.labels or {}).get(creation.WORKING_DIR))

    def remember(self, found: AsyncSandbox, working_dir: str | None) -> Box:
        from lowtide.providers.daytona.sessions import Sessions

        box = self._known[found.id] = Box(found, Sessions(found), working_dir)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return box

    def forget(self, sandbox_id: str) -> None:
        box = self._known.pop(sandbox_id, None)
        if box is not None:
            box.sessions.forget()

    def forget_all(self) -> None:
        for box in self._known.values():
            box.sessions.forget()
        self._known.clear()

    @asynccontextmanager
    async def inside(self, sandbox_id: str) -> AsyncIterator[Box]:
        """For work in it. What goes wrong on the way is told as what it means: mostly that it is gone."""
        try:
            try:
                box = await self.get(sandbox_id)
            except errors.SandboxNotFoundError as error:
                raise looking.gone(sandbox_id) from error
            yield box
        except errors.LowtideError as error:
            meant = await self.explained(error, sandbox_id)
            if meant is error:
                raise
            raise meant from error

    async def explained(self, error: errors.LowtideError, sandbox_id: str) -> errors.LowtideError:
        """Gone, stopped, or really only unreachable: the control plane knows."""
        clear = (errors.SandboxFileError, errors.RateLimitError, errors.UnsupportedError)
        ambiguous = (errors.SandboxError, errors.ValidationError, errors.AuthenticationError)
        if isinstance(error, clear) or not isinstance(error, ambiguous):
            return error
        context: dict[str, Any] = {"provider": PROVIDER, "sandbox_id": sandbox_id}
        try:
            info = await looking.info(self._client, sandbox_id)
        except errors.SandboxNotFoundError:
            self.forget(sandbox_id)
            return error if isinstance(error, errors.SandboxGone) else looking.gone(sandbox_id)
        except errors.LowtideError:
            return error
        if info.state in (SandboxState.ENDING, SandboxState.GONE):
            return looking.gone(sandbox_id)
        if info.state in (SandboxState.STOPPED, SandboxState.PAUSED):
            self.forget(sandbox_id)
            return errors.SandboxUnavailableError(
                f"sandbox {sandbox_id} is {info.state.value}; start it first", retryable=False, **context
            )
        if isinstance(error, errors.SandboxGone | errors.SandboxNotFoundError):
            # It is there: what was not found is something in it, or the way to it lags behind.
            return errors.SandboxUnavailableError(str(error), **context)
        return error
