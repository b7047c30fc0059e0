"""What Runloop says of a devbox: by id, by status in pages, or when it is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import Labels, SandboxInfo, SandboxState
from lowtide.providers.runloop.errors import SERVICE

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

T = TypeVar("T")

CALL_SECONDS = 30.0
_HOLD_SECONDS = 20.0
_PATIENCE_SECONDS = 2.0
_PAGE = 1000
_STATES = {
    "queued": SandboxState.PENDING,
    "scheduled": SandboxState.PENDING,
    "provisioning": SandboxState.PENDING,
    "initializing": SandboxState.PENDING,
    "resuming": SandboxState.PENDING,
    "running": SandboxState.RUNNING,
    "suspending": SandboxState.PAUSED,
    "suspended": SandboxState.PAUSED,
    "failure": SandboxState.FAILED,
    "shutdown": SandboxState.GONE,
}
_LISTED = ("queued", "provisioning", "initializing", "running", "suspending", "suspended", "resuming")
"""What holds anything, in the order in which a devbox goes through it: one that moves on meanwhile is seen again.
What has ended stays in Runloop's lists for ever, and is left out of them by asking for these only."""


def info_of(view: Any) -> SandboxInfo:
    """From a DevboxView. A status that is new to us is taken for one that holds something."""
    state = _STATES.get(str(view.status), SandboxState.PENDING)
    created = datetime.fromtimestamp(view.create_time_ms / 1000, UTC) if view.create_time_ms else None
    reason = view.failure_reason if state is SandboxState.FAILED else view.shutdown_reason
    return SandboxInfo(
        sandbox_id=str(view.id),
        state=state,
        labels=dict(view.metadata or {}),
        created_at=created,
        reason=str(reason) if reason else None,
    )


def keep_alive_of(view: Any) -> float | None:
    """How long it lives after a keep-alive; None where that is not what ends it."""
    launch = view.launch_parameters
    seconds = getattr(launch, "keep_alive_time_seconds", None)
    return float(seconds) if seconds else None


async def asked(call: Callable[[], Awaitable[T]], what: str, sandbox_id: str | None = None) -> T:
    """The answer to what may be asked any number of times: again after a lost answer, for two seconds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for delay in hosted.backoff(0.1, 1.0):
        try:
            return await SERVICE.call(CALL_SECONDS, call(), what, sandbox_id)
        except (errors.SandboxUnavailableError, errors.RequestTimeoutError) as error:
            wait = max(delay, getattr(error, "retry_after_seconds", None) or 0.0)
            if time.monotonic() + wait > deadline:
                raise
            await asyncio.sleep(wait)
    raise AssertionError  # `backoff` has no end


async def view_of(client: AsyncRunloop, sandbox_id: str) -> Any:
    """Raises SandboxNotFoundError. Never changes anything."""
    if not hosted.is_word(sandbox_id):
        raise SERVICE.missing(sandbox_id)
    return await asked(lambda: client.devboxes.retrieve(sandbox_id), "get", sandbox_id)


async def settled(client: AsyncRunloop, sandbox_id: str, statuses: tuple[str, ...]) -> SandboxInfo:
    """What it is when it has one of these statuses, or when Runloop would hold the answer no longer."""
    from runloop_api_client.types import DevboxView

    body = {"statuses": [*statuses, "failure", "shutdown"], "timeout_seconds": _HOLD_SECONDS}
    path = f"/v1/devboxes/{sandbox_id}/wait_for_status"
    try:
        waiting = client.post(path, body=body, cast_to=DevboxView)
        return info_of(await SERVICE.call(_HOLD_SECONDS + 10.0, waiting, "wait", sandbox_id))
    except (errors.RequestTimeoutError, errors.SandboxUnavailableError):  # a 408 is how it says: not yet
        return info_of(await view_of(client, sandbox_id))


async def listed(client: AsyncRunloop, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
    """Every devbox of ours with these labels. Runloop has no filter for them: all pages are looked through here."""
    seen: set[str] = set()
    for status in _LISTED:
        async for view in _pages(client, status):
            matches = all((view.metadata or {}).get(key) == value for key, value in labels.items())
            if view.id in seen or not matches or Labels.from_dict(view.metadata or {}) is None:
                continue
            seen.add(view.id)
            yield info_of(view)


async def _pages(client: AsyncRunloop, status: str) -> AsyncIterator[Any]:
    after: str | None = None
    restarts = 0
    while True:
        query: dict[str, Any] = {"status": status, "limit": _PAGE}
        if after is not None:
            query["starting_after"] = after
        try:
            page = await asked(lambda query=query: _page(client, query), "list")  # type: ignore[misc]
        except errors.ValidationError:
            if after is None or restarts == 3:
                raise
            after, restarts = None, restarts + 1  # what the page began after has another status now
            continue
        for view in page.devboxes:
            yield view
        if not page.has_more or not page.devboxes:
            return
        after = page.devboxes[-1].id


async def _page(client: AsyncRunloop, query: dict[str, Any]) -> Any:
    return await client.devboxes.list(**query)


def until(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
