"""What stands between a runtime and its sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lowtide.actionserver.models import Action, Observation
from lowtide.providers.base import Url


class Backend(Protocol):
    """How actions reach the sandbox: through the action server, or directly."""

    async def open(self, *, attach: bool) -> None: ...

    async def execute(self, action: Action, on_output: Callable[[str], None] | None) -> Observation: ...

    async def cancel(self, session: str, grace_seconds: float) -> bool: ...

    async def url(self) -> Url: ...

    async def editor_url(self) -> str | None: ...

    async def stop_inside(self, seconds: float) -> None: ...

    async def last_log(self) -> str: ...

    async def aclose(self) -> None: ...
