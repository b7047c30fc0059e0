"""Why a sandbox does not answer: it has ended, and how, or it is paused, or the way to it broke."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError, SandboxGone, SandboxNotFoundError, SandboxUnavailableError
from lowtide.providers.base import SandboxState
from lowtide.providers.docker.errors import SERVICE, mapped
from lowtide.providers.inside import Asleep
from lowtide.providers.inside.program import EXPIRED

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider


async def explained(provider: DockerProvider, sandbox_id: str, error: LowtideError) -> LowtideError:
    """A refusal to run something, as what it means: the sandbox has ended, or is paused."""
    words = str(error)
    if isinstance(error, SandboxNotFoundError) or "is not running" in words or "state improper" in words:
        try:
            info = await provider.get(sandbox_id)
        except SandboxNotFoundError:
            return gone(sandbox_id, (await how_it_ended(provider, sandbox_id))[0])
        except LowtideError as unknown:
            return unknown
        if info.state is SandboxState.PAUSED:
            return paused(sandbox_id)
        if info.state.terminal or info.state is SandboxState.ENDING:
            return gone(sandbox_id, info.reason or (await how_it_ended(provider, sandbox_id))[0])
    elif "is paused" in words:
        return paused(sandbox_id)
    return error


def paused(sandbox_id: str) -> SandboxUnavailableError:
    words = "the sandbox is paused: resume() it first"
    return SERVICE.error(Asleep, words, sandbox_id)


def gone(sandbox_id: str, reason: str) -> SandboxGone:
    return SERVICE.error(SandboxGone, f"the sandbox has ended ({reason})", sandbox_id, reason=reason)


async def how_it_ended(provider: DockerProvider, sandbox_id: str) -> tuple[str, int | None]:
    """Reason and exit code. Auto-removed containers leave only the engine's recent events to tell them."""
    client = await provider.client()
    filters = {"container": [provider.known_container(sandbox_id) or sandbox_id], "type": ["container"]}
    options = {
        "since": str(int(time.time()) - 86400),
        "until": str(int(time.time()) + 1),
        "filters": json.dumps(filters),
    }
    reason, code = "deleted", None
    with suppress(LowtideError, ValueError, TimeoutError):
        async with asyncio.timeout(10):
            with mapped(sandbox_id):
                async with client.stream("GET", "events", params=options) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        word = event.get("Action") or event.get("status")
                        if word == "oom":
                            reason = "oom"
                        elif word == "die":
                            code = int(event["Actor"]["Attributes"].get("exitCode", 255))
                            if reason != "oom":
                                reason = how(code)
                        elif word in ("destroy", "remove"):
                            break
    return reason, code


def how(code: int) -> str:
    """What the exit code of PID 1 says about the end of a sandbox; nothing inside can kill it."""
    return {EXPIRED: "expired", 137: "deleted"}.get(code, "exited")
