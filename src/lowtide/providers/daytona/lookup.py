"""Which sandboxes there are and what they are now: by id or name, or by their labels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import SandboxInfo, SandboxState
from lowtide.providers.daytona.access import Connection
from lowtide.providers.daytona.errors import SERVICE

CALL_SECONDS = 30.0
STATE_SECONDS = 300.0
"""How long a change of state (start, stop, pause, snapshot) may take."""
_PAGE = 100
_WORDS = {
    SandboxState.RUNNING: ("started", "resizing", "snapshotting", "forking"),
    SandboxState.STOPPED: ("stopping", "stopped", "archiving", "archived"),
    SandboxState.PAUSED: ("pausing", "paused"),
    SandboxState.ENDING: ("destroying",),
    SandboxState.GONE: ("destroyed",),
    SandboxState.FAILED: ("error", "build_failed"),
}
_STATES = {word: state for state, words in _WORDS.items() for word in words}


def info_of(found: Any) -> SandboxInfo:
    """From the SDK's sandbox, its answer to a get, or an entry of a list."""
    return SandboxInfo(
        sandbox_id=str(found.id),
        state=_STATES.get(_word(found), SandboxState.PENDING),
        labels=dict(found.labels or {}),
        created_at=_moment(found.created_at),
        expires_at=_moment(getattr(found, "auto_destroy_at", None)),
        reason=found.error_reason,
    )


def _word(found: Any) -> str:
    """Daytona's own word for the state."""
    return str(getattr(found.state, "value", found.state) or "unknown")


def _moment(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        read = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return read if read.tzinfo is not None else read.replace(tzinfo=UTC)


async def info(connection: Connection, sandbox_id: str) -> SandboxInfo:
    """SandboxNotFoundError when there is none."""
    return info_of(await detail(connection, sandbox_id))


async def detail(connection: Connection, sandbox_id: str) -> Any:
    if not hosted.is_word(sandbox_id):
        raise SERVICE.missing(sandbox_id)
    api: Any = (await connection.sdk())._sandbox_api
    try:
        found = await SERVICE.call(CALL_SECONDS, api.get_sandbox(sandbox_id), "get", sandbox_id)
    except (errors.SandboxNotFoundError, errors.SandboxGone) as error:
        raise SERVICE.missing(sandbox_id) from error
    # By id, or by name: Daytona takes both.
    SERVICE.check_about(sandbox_id, found.id if found.name != sandbox_id else sandbox_id)
    if not hosted.is_id(found.id):
        raise SERVICE.elsewhere(sandbox_id)
    if _word(found) == "destroyed":
        raise SERVICE.missing(sandbox_id)
    return found


async def until(connection: Connection, sandbox_id: str, word: str) -> None:
    """Wait for one of Daytona's own states."""
    deadline = time.monotonic() + STATE_SECONDS
    for delay in hosted.backoff(most=1.0, factor=1.5):
        found = _word(await detail(connection, sandbox_id))
        if found == word:
            return
        if found in ("error", "build_failed") or time.monotonic() > deadline:
            raise errors.SandboxUnavailableError(
                f"sandbox {sandbox_id} is {found}, not {word}", provider="daytona", sandbox_id=sandbox_id
            )
        await asyncio.sleep(delay)


async def listed(connection: Connection, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
    """Below the SDK's own list, which fails for all when one foreign sandbox has an unknown language."""
    api: Any = (await connection.sdk())._sandbox_api
    wanted = json.dumps(dict(labels)) if labels else None
    cursor: str | None = None
    for _ in hosted.pages(SERVICE):
        asking = api.list_sandboxes(labels=wanted, cursor=cursor, limit=_PAGE)
        page = await SERVICE.call(CALL_SECONDS, asking, "list")
        for one in page.items:
            found = info_of(one)
            matches = all(found.labels.get(key) == value for key, value in labels.items())
            if matches and found.state is not SandboxState.GONE:
                yield found
        cursor = page.next_cursor
        if not cursor:
            return


async def the_one(connection: Connection, labels: Mapping[str, str]) -> SandboxInfo:
    """The one sandbox with these labels, confirmed by its id. Missing is an error, and so is more than one."""
    seen = {found.sandbox_id async for found in listed(connection, labels)}
    there = []
    for sandbox_id in seen:
        with contextlib.suppress(errors.SandboxNotFoundError):
            there.append(await info(connection, sandbox_id))
    if len(there) == 1:
        return there[0]
    shown = ", ".join(f"{key}={value}" for key, value in labels.items())
    if there:
        raise errors.ValidationError(
            f"{len(there)} sandboxes have the labels {shown}: "
            + ", ".join(found.sandbox_id for found in there),
            argument="labels",
            provider="daytona",
        )
    raise errors.SandboxNotFoundError(f"no sandbox has the labels {shown}", provider="daytona")
