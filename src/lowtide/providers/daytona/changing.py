"""Changing a sandbox without ending it: its clocks, stopping, starting, archiving, pausing."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

from lowtide import errors
from lowtide.providers.base import SandboxState
from lowtide.providers.daytona import creation, looking, states
from lowtide.providers.daytona.boxes import Boxes
from lowtide.providers.daytona.client import Client
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import PROVIDER, mapped
from lowtide.providers.daytona.looking import CALL_SECONDS, STATE_SECONDS


async def renew(boxes: Boxes, sandbox_id: str, lifetime_seconds: float) -> datetime:
    box = await boxes.get(sandbox_id)
    lives = creation.minutes(lifetime_seconds)
    with mapped(sandbox_id):
        await within(CALL_SECONDS, box.sdk.set_ttl(lives), "set_ttl", sandbox_id)
        stops = int(box.sdk.auto_stop_interval or 0)
        if 0 < stops < lives:  # left alone for that long, as one that is kept, it would be stopped first
            setting = box.sdk.set_autostop_interval(lives)
            await within(CALL_SECONDS, setting, "set_autostop_interval", sandbox_id)
    with contextlib.suppress(errors.SandboxUnavailableError, errors.ValidationError), mapped(sandbox_id):
        await within(CALL_SECONDS, box.sdk.refresh_activity(), "refresh_activity", sandbox_id)
    return datetime.now(UTC) + timedelta(minutes=lives)


async def delete_after(boxes: Boxes, sandbox_id: str, seconds: float) -> None:
    """Daytona itself deletes it: both clocks, that of a stopped one and the hard one."""
    box = await boxes.get(sandbox_id)
    after = creation.minutes(seconds)
    with mapped(sandbox_id):
        setting = box.sdk.set_auto_delete_interval(after)
        await within(CALL_SECONDS, setting, "set_auto_delete_interval", sandbox_id)
        await within(CALL_SECONDS, box.sdk.set_ttl(after), "set_ttl", sandbox_id)


async def stop(client: Client, boxes: Boxes, sandbox_id: str) -> None:
    """Silent when it does not run."""
    info = await looking.info(client, sandbox_id)
    if info.state is not SandboxState.STOPPED:
        box = await boxes.get(sandbox_id)
        with mapped(sandbox_id):
            await within(STATE_SECONDS, box.sdk.stop(timeout=0), "stop", sandbox_id)
    boxes.forget(sandbox_id)


async def start(boxes: Boxes, sandbox_id: str) -> None:
    """From stopped, archived or paused; silent when it runs."""
    box = await boxes.get(sandbox_id, anew=True)
    if states.info(box.sdk).state is not SandboxState.RUNNING:
        with mapped(sandbox_id):
            await within(STATE_SECONDS, box.sdk.start(timeout=0), "start", sandbox_id)


async def archive(client: Client, boxes: Boxes, sandbox_id: str) -> None:
    """Its files go to object storage. It is stopped first; `start` brings it back."""
    await stop(client, boxes, sandbox_id)
    box = await boxes.get(sandbox_id)
    with mapped(sandbox_id):
        await within(CALL_SECONDS, box.sdk.archive(), "archive", sandbox_id)
    await looking.until(client, sandbox_id, "archived")
    boxes.forget(sandbox_id)


async def pause(boxes: Boxes, sandbox_id: str) -> None:
    box = await boxes.get(sandbox_id)
    try:
        with mapped(sandbox_id):
            await within(STATE_SECONDS, box.sdk.pause(timeout=0), "pause", sandbox_id)
    except errors.ValidationError as error:
        raise errors.UnsupportedError(
            f"Daytona does not pause this sandbox: {error}",
            feature="pause",
            alternative="a snapshot whose class can be paused",
            provider=PROVIDER,
            sandbox_id=sandbox_id,
        ) from error
    boxes.forget(sandbox_id)
