"""Which sandboxes there are and what they are now: by id or name, or by their labels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from lowtide import errors
from lowtide.providers.base import SandboxInfo, SandboxState
from lowtide.providers.daytona import states
from lowtide.providers.daytona.client import Client
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import PROVIDER, mapped

CALL_SECONDS = 30.0
STATE_SECONDS = 300.0
"""How long a change of state (start, stop, pause, snapshot) may take."""
_PAGE = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")


def is_name(sandbox_id: str) -> bool:
    """Ids and names are plain words. Anything else must not become part of a path."""
    return _NAME.fullmatch(sandbox_id) is not None


def gone(sandbox_id: str) -> errors.SandboxGone:
    return errors.SandboxGone(
        f"sandbox {sandbox_id} has ended", reason="ended", provider=PROVIDER, sandbox_id=sandbox_id
    )


async def info(client: Client, sandbox_id: str) -> SandboxInfo:
    """SandboxNotFoundError when there is none."""
    return states.info(await detail(client, sandbox_id))


async def detail(client: Client, sandbox_id: str) -> Any:
    missing = errors.SandboxNotFoundError(
        f"no sandbox {sandbox_id} in this Daytona account", provider=PROVIDER, sandbox_id=sandbox_id
    )
    if not is_name(sandbox_id):
        raise missing
    api: Any = (await client.sdk())._sandbox_api
    try:
        with mapped(sandbox_id):
            detail = await within(CALL_SECONDS, api.get_sandbox(sandbox_id), "get", sandbox_id)
    except (errors.SandboxNotFoundError, errors.SandboxGone) as error:
        raise missing from error
    if states.word(detail) == "destroyed":
        raise missing
    return detail


async def until(client: Client, sandbox_id: str, word: str) -> None:
    """Wait for one of Daytona's own states."""
    deadline = time.monotonic() + STATE_SECONDS
    delay = 0.05
    while (found := states.word(await detail(client, sandbox_id))) != word:
        if found in ("error", "build_failed") or time.monotonic() > deadline:
            raise errors.SandboxUnavailableError(
                f"sandbox {sandbox_id} is {found}, not {word}", provider=PROVIDER, sandbox_id=sandbox_id
            )
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, 1.0)


async def until_ready(client: Client, sandbox_id: str) -> SandboxInfo:
    delay = 0.05
    while True:
        try:
            found = await info(client, sandbox_id)
        except errors.SandboxNotFoundError as error:
            raise gone(sandbox_id) from error
        if found.state is SandboxState.ENDING:
            raise gone(sandbox_id)
        if found.state is SandboxState.FAILED:
            raise errors.SandboxFailedError(
                f"sandbox {sandbox_id} could not be started: {found.reason or 'error'}",
                reason=found.reason or "error",
                provider=PROVIDER,
                sandbox_id=sandbox_id,
            )
        if found.state is not SandboxState.PENDING:
            return found
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, 1.0)


async def listed(client: Client, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
    """Below the SDK's own list, which fails for all when one foreign sandbox has an unknown language."""
    api: Any = (await client.sdk())._sandbox_api
    cursor: str | None = None
    while True:
        with mapped():
            asking = api.list_sandboxes(
                labels=json.dumps(dict(labels)) if labels else None, cursor=cursor, limit=_PAGE
            )
            page = await within(CALL_SECONDS, asking, "list")
        for one in page.items:
            found = states.info(one)
            matches = all(found.labels.get(key) == value for key, value in labels.items())
            if matches and found.state is not SandboxState.GONE:
                yield found
        cursor = page.next_cursor
        if not cursor:
            return


async def the_one(client: Client, labels: Mapping[str, str]) -> SandboxInfo:
    """The one sandbox with these labels, confirmed by its id. Missing is an error, and so is more than one."""
    seen = {found.sandbox_id: found async for found in listed(client, labels)}
    there = []
    for sandbox_id in seen:
        with contextlib.suppress(errors.SandboxNotFoundError):
            there.append(await info(client, sandbox_id))
    if len(there) == 1:
        return there[0]
    shown = ", ".join(f"{key}={value}" for key, value in labels.items())
    if there:
        raise errors.ValidationError(
            f"{len(there)} sandboxes have the labels {shown}: "
            + ", ".join(found.sandbox_id for found in there),
            argument="labels",
            provider=PROVIDER,
        )
    raise errors.SandboxNotFoundError(f"no sandbox has the labels {shown}", provider=PROVIDER)
