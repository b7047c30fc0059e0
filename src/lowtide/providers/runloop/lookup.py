"""What Runloop says of a devbox: by id, by status in pages, or when it is ready."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import Labels, SandboxInfo, SandboxState
from lowtide.providers.runloop.errors import SERVICE

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

CALL_SECONDS = 30.0
_HOLD_SECONDS = 20.0
_LIST_SECONDS = 120.0
_PAGE = 1000
_STATES = {
    "running": SandboxState.RUNNING,
    "suspending": SandboxState.PAUSED,
    "suspended": SandboxState.PAUSED,
    "failure": SandboxState.FAILED,
    "shutdown": SandboxState.GONE,
}
_LISTED = ("queued", "provisioning", "initializing", "running", "suspending", "suspended", "resuming")
"""What holds anything, in the order in which a devbox goes through it: one that moves on meanwhile is seen again.
What has ended stays in Runloop's lists for ever, and is left out of them by asking for these only."""


def checked(view: Any, sandbox_id: str | None = None) -> Any:
    """A DevboxView that can be read, and is about this devbox where one was asked for: the SDK passes on whatever came.

    Raises SandboxUnavailableError.
    """
    if _readable(view):
        if sandbox_id is not None:
            SERVICE.check_about(sandbox_id, view.id)
        return view
    words = "Runloop, or somebody on the way to it, answered with something else than a devbox"
    raise errors.SandboxUnavailableError(words, provider=SERVICE.provider)


def _readable(view: Any) -> bool:
    found, metadata = getattr(view, "id", None), getattr(view, "metadata", None)
    return hosted.is_id(found) and isinstance(metadata or {}, dict)


def info_of(view: Any) -> SandboxInfo:
    """From a DevboxView. A status that is new to us is taken for one that holds something."""
    state = _STATES.get(str(view.status), SandboxState.PENDING)
    created = None
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):  # not a time
        created = datetime.fromtimestamp(view.create_time_ms / 1000, UTC)
    reason = view.failure_reason if state is SandboxState.FAILED else view.shutdown_reason
    return SandboxInfo(
        sandbox_id=str(view.id),
        state=state,
        labels=dict(view.metadata or {}),
        created_at=created,
        reason=str(reason) if reason else None,
    )


async def view_of(client: AsyncRunloop, sandbox_id: str) -> Any:
    """Raises SandboxNotFoundError. Never changes anything."""
    if not hosted.is_word(sandbox_id):
        raise SERVICE.missing(sandbox_id)
    found = await SERVICE.again(lambda: client.devboxes.retrieve(sandbox_id), "get", sandbox_id)
    return checked(found, sandbox_id)


async def settled(client: AsyncRunloop, sandbox_id: str, statuses: tuple[str, ...]) -> SandboxInfo:
    """What it is when it has one of these statuses, or when Runloop would hold the answer no longer."""
    from runloop_api_client.types import DevboxView

    body = {"statuses": [*statuses, "failure", "shutdown"], "timeout_seconds": _HOLD_SECONDS}
    path = f"/v1/devboxes/{sandbox_id}/wait_for_status"
    try:
        waiting = client.post(path, body=body, cast_to=DevboxView)
        found = await SERVICE.call(_HOLD_SECONDS + 10.0, waiting, "wait", sandbox_id)
        return info_of(checked(found, sandbox_id))
    except (errors.RequestTimeoutError, errors.SandboxUnavailableError):  # a 408 is how it says: not yet
        return info_of(await view_of(client, sandbox_id))


async def listed(client: AsyncRunloop, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
    """Every devbox of ours with these labels. Runloop has no filter for them: all pages are looked through here."""
    seen: set[str] = set()

    async def found(status: str) -> list[SandboxInfo]:
        pages = client.devboxes.list(status=status, limit=_PAGE)
        return [
            info_of(view) async for view in pages if _readable(view) and _is_ours(view.metadata or {}, labels)
        ]

    for status in _LISTED:
        for tries in (2, 1, 0):
            try:
                infos = await SERVICE.again(lambda s=status: found(s), "list", seconds=_LIST_SECONDS)  # type: ignore[misc]
                break
            except errors.ValidationError:  # what a page was to begin after has another status now
                if not tries:
                    raise
        for info in infos:
            if info.sandbox_id not in seen:
                seen.add(info.sandbox_id)
                yield info


def _is_ours(metadata: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    matches = all(metadata.get(key) == value for key, value in labels.items())
    return matches and Labels.from_dict(metadata) is not None


def until(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
