"""Who reads the log of a main process, and who stops."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from lowtide import Sandbox
from lowtide.engine import engine

CHATTY = "while :; do echo x; sleep 0.02; done"


async def _readers() -> int:
    return sum(task.get_coro().__qualname__ == "_read" for task in asyncio.all_tasks())


async def test_a_reader_that_was_cancelled_reads_no_further() -> None:
    async with Sandbox.run("sh", "-c", CHATTY) as box:
        await box
        before = engine().run(_readers(), 10.0)

        async def read() -> None:
            async for _ in box.stream_logs(follow=True):
                begun.set()

        for _ in range(5):
            begun = asyncio.Event()
            reading = asyncio.create_task(read())
            await asyncio.wait_for(begun.wait(), 30.0)
            reading.cancel()
            await asyncio.wait([reading])
            del reading
        deadline = time.monotonic() + 10.0
        while engine().run(_readers(), 10.0) > before:
            assert time.monotonic() < deadline, "the log is still read, for nobody"
            await asyncio.sleep(0.02)


def test_one_that_nobody_has_any_more_and_is_far_behind_reads_no_further() -> None:
    with Sandbox.run("sh", "-c", "yes; sleep 1000") as box:
        before = engine().run(_readers(), 10.0)
        reader = box.stream_logs(follow=True)
        next(reader)
        deadline = time.monotonic() + 30.0
        while reader.buffered < 4 << 20:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        del reader
        while engine().run(_readers(), 10.0) > before:
            assert time.monotonic() < deadline, "the log is still read, for nobody"
            time.sleep(0.02)


def test_a_forked_child_lets_go_of_its_parents_reader_in_silence() -> None:
    script = f"""
import os
from lowtide import Sandbox

with Sandbox.run("sh", "-c", {CHATTY!r}) as box:
    reader = box.stream_logs(follow=True)
    next(reader)
    if os.fork() == 0:
        del reader
        os._exit(0)
    assert os.wait()[1] == 0
    print(next(reader)[0])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],  # newer Pythons warn of the fork
        env={**os.environ, "LOWTIDE_PROVIDER": "local"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("x\n", "")
