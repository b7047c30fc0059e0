"""A channel that is one answer: the program takes what it is told to its end, answers, and lets go."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.inside_program import PROGRAM, Inside, PipeChannel, run, serving

from lowtide.providers.inside import Answer, Channel, Clients

pytestmark = pytest.mark.timeout(120)


class Once(Inside):
    """Its first channel is one answer, asked for as often as `times` says; those after it are pipes."""

    times = 1
    answers = 0

    async def open(self, first: bytes) -> Channel:  # type: ignore[override]
        if self.answers:
            return await super().open(first)
        self.answers += 1
        for _ in range(self.times):
            process = await asyncio.create_subprocess_exec(
                *(*self.argv, "serve", self.name, "text", "once"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self.environment,
            )
            text, _ = await process.communicate(first)
            self.channels.append(PipeChannel(process))
        return Answer(text)


@asynccontextmanager
async def once(times: int = 1) -> AsyncIterator[Once]:
    inside = Once(text=True)
    inside.times = times
    try:
        yield inside
    finally:
        await inside.aclose()


async def test_a_command_and_its_end_are_one_answer_and_twice_asked_it_runs_once(tmp_path: Path) -> None:
    async with once(times=3) as inside:
        client = inside.client()
        script = f"echo ran >>{tmp_path}/count; echo out; echo err >&2; exit 3"
        assert await run(client, "sh", "-c", script) == (3, b"out\n", b"err\n")
        assert (tmp_path / "count").read_text() == "ran\n"
        assert len(inside.channels) == 3
        await asyncio.sleep(0.1)  # were another channel opened for nothing, it would be by now
        assert len(inside.channels) == 3
        assert not client.alive


async def test_a_command_that_goes_on_is_followed_over_the_next_channel(tmp_path: Path) -> None:
    async with once() as inside:
        script = f"echo ran >>{tmp_path}/count; echo out; sleep 0.5; echo more; exit 3"
        assert await run(inside.client(), "sh", "-c", script) == (3, b"out\nmore\n", b"")
        assert (tmp_path / "count").read_text() == "ran\n"
        assert len(inside.channels) == 2


async def test_a_command_that_waits_for_input_lets_the_answer_go(tmp_path: Path) -> None:
    async with once() as inside:
        assert await run(inside.client(), "wc", "-c", input=bytes(2_000_000)) == (0, b"2000000\n", b"")
        assert len(inside.channels) == 2


async def test_the_next_command_after_an_answer_has_a_client_of_its_own() -> None:
    async with once() as inside:

        async def key(_: str) -> bytes:
            return b"k" * 16

        clients = Clients("test", lambda _, first: inside.open(first), key, text=True)
        first = await clients.get("here")
        inside.clients.append(first)
        assert await run(first, "echo", "one") == (0, b"one\n", b"")
        while first.alive:
            await asyncio.sleep(0)
        second = await clients.get("here")
        inside.clients.append(second)
        assert second is not first
        assert await run(second, "echo", "two") == (0, b"two\n", b"")
        assert await clients.get("here") is second
        assert second.pid == first.pid, "the same server"


async def test_a_file_of_its_own_goes_when_it_runs(tmp_path: Path) -> None:
    brought = shutil.copy(PROGRAM, tmp_path / "brought")
    async with serving(text=True, argv=(str(brought),)) as inside:
        inside.words = ("own",)
        assert await run(inside.client(), "echo", "hi") == (0, b"hi\n", b"")
        assert not Path(brought).exists()
