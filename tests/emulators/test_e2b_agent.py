"""The file agent inside an emulated sandbox ends with it, and nobody is left with an answer unread."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from lowtide.emulators.agent.client import Agent
from lowtide.emulators.backing import Backing
from lowtide.errors import SandboxUnavailableError


async def test_questions_under_way_hear_that_the_agent_has_ended(tmp_path: Path) -> None:
    backing = Backing(tmp_path, limit=1)
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    try:
        sandbox_id = await backing.create()
        agent = await Agent.start(backing, sandbox_id, user=None, home="/")
        opened, _ = await agent.ask("open_write", path="/tmp/file")
        # More than the agent can take at once: some of them wait for their turn to be sent.
        asking = [
            asyncio.ensure_future(agent.ask("write", b"x" * (1 << 20), handle=opened["handle"]))
            for _ in range(64)
        ]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        await backing.destroy(sandbox_id)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(answers[-1], SandboxUnavailableError)
        await agent.aclose()
        del asking, answers
        gc.collect()
        await asyncio.sleep(0)
    finally:
        await backing.aclose()
    assert not unheard


async def test_callers_that_leave_at_any_time_spoil_nothing_for_the_next(tmp_path: Path) -> None:
    backing = Backing(tmp_path, limit=1)
    try:
        sandbox_id = await backing.create()
        agent = await Agent.start(backing, sandbox_id, user=None, home="/")
        opened, _ = await agent.ask("open_write", path="/tmp/file")
        for turns in range(40):
            # More than a pipe holds: the caller leaves while some of its bytes are sent and some are not.
            asking = asyncio.ensure_future(agent.ask("write", b"x" * (1 << 20), handle=opened["handle"]))
            opening = asyncio.ensure_future(agent.ask("open_read", path="/etc/passwd"))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            opening.cancel()
            await asyncio.gather(asking, opening, return_exceptions=True)
        async with asyncio.timeout(30):
            found, _ = await agent.ask("stat", path="/tmp/file")
            assert found["entry"]["kind"] == "file"
            await agent.ask("stat", path="/tmp")  # what was taken back is closed by now
            again, _ = await agent.ask("open_read", path="/etc/passwd")
        assert again["handle"] < opened["handle"] + 8, "what nobody heard of is still open"
        await agent.aclose()
    finally:
        await backing.aclose()
