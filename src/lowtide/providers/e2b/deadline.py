"""An outer deadline around every call of the SDK, whose own timeouts do not always hold."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lowtide.providers import hosted
from lowtide.providers.e2b.leaving import track

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T], what: str, sandbox_id: str | None = None) -> T:
    """The result of `work`, or RequestTimeoutError after `seconds`, even when `work` ignores being cancelled."""
    call = asyncio.ensure_future(work)
    track(call)
    return await hosted.within(seconds, call, what, service="E2B", provider="e2b", sandbox_id=sandbox_id)
