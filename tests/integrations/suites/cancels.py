"""Given up at every await, and by Ctrl+C: for every adapter the same cases. A suite imports them and gives the fixture `adapter`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lowtide import Sandbox, SandboxError
from tests.integrations.suites.kills import open_leases
from tests.integrations.suites.own_home import PROVIDER

__all__ = [
    "test_a_command_that_is_given_up_while_it_runs_is_ended",
    "test_given_up_at_every_await_a_call_ends_and_the_next_one_works",
    "test_given_up_at_every_await_of_its_end_it_ends",
    "test_given_up_at_every_await_while_it_is_made_it_leaves_nothing",
    "test_one_that_is_used_by_a_loop_that_is_closed_is_used_by_the_next",
]

LONG = f"1077.{os.getpid()}"
"""Seconds that a command sleeps, by which it is known among this machine's processes."""
SECONDS = 60.0
"""For what must happen, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What a framework does with a sandbox, each as one awaitable; `make` may leave the making to the first `run`."""

    make: Callable[[], Awaitable[Any]]
    run: Callable[[Any, str], Awaitable[Any]]
    put: Callable[[Any, str, bytes], Awaitable[Any]]
    end: Callable[[Any], Awaitable[Any]]


class CancelledAt:
    """Awaits `work` and cancels its task at the await with that number, in the instant in which it begins to wait."""

    def __init__(self, work: Awaitable[Any], number: int) -> None:
        self._work, self._number = work, number
        self.was_reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, count = self._work.__await__(), 0
        step: Callable[[], Any] = lambda: steps.send(None)  # noqa: E731
        while True:
            try:
                waited_for = step()
            except StopIteration as done:
                return done.value
            if count == self._number:
                self.was_reached = True
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            count += 1
            try:
                value = yield waited_for
            except BaseException as error:
                step = lambda error=error: steps.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                step = lambda value=value: steps.send(value)  # type: ignore[misc]  # noqa: E731


async def _cancelled(work: Awaitable[Any], number: int) -> bool:
    """Whether there was such an await. If so, the cancellation must have come out."""
    at = CancelledAt(work, number)

    async def task() -> None:
        await at

    try:
        async with asyncio.timeout(SECONDS):
            await asyncio.create_task(task())
    except asyncio.CancelledError:
        assert at.was_reached
    return at.was_reached


def test_given_up_at_every_await_while_it_is_made_it_leaves_nothing(adapter: Adapter) -> None:
    async def main() -> None:
        number, reached = 0, True
        while reached:
            made: list[Any] = []

            async def make(made: list[Any] = made) -> None:
                made.append(await adapter.make())

            reached = await _cancelled(make(), number)
            number += 1
            for one in made:
                await adapter.end(one)
            await until(lambda: open_leases() == [])

    asyncio.run(main())


@pytest.mark.parametrize("call", ["run", "put"])
def test_given_up_at_every_await_a_call_ends_and_the_next_one_works(adapter: Adapter, call: str) -> None:
    async def main() -> None:
        one = await adapter.make()
        try:
            number, reached = 0, True
            while reached:
                work = (
                    adapter.run(one, "exec sleep 0.5077")
                    if call == "run"
                    else adapter.put(one, "/tmp/x", b"x")
                )
                reached = await _cancelled(work, number)
                number += 1
                await adapter.run(one, "true")
            assert number > 1
        finally:
            await adapter.end(one)
        await until(lambda: open_leases() == [])

    asyncio.run(main())


def test_a_command_that_is_given_up_while_it_runs_is_ended(adapter: Adapter) -> None:
    async def main() -> None:
        one = await adapter.make()
        try:
            await adapter.run(one, "true")
            running = asyncio.ensure_future(
                _as_task(adapter.run(one, f"touch /tmp/begun; exec sleep {LONG}"))
            )
            await until(lambda: in_the_sandbox("/tmp/begun"))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await until(lambda: not is_running())
            await adapter.run(one, "true")
        finally:
            await adapter.end(one)

    asyncio.run(main())


def test_given_up_at_every_await_of_its_end_it_ends(adapter: Adapter) -> None:
    async def main() -> None:
        number, reached = 0, True
        while reached:
            one = await adapter.make()
            await adapter.run(one, "true")
            reached = await _cancelled(adapter.end(one), number)
            number += 1
            await until(lambda: open_leases() == [])
            await adapter.end(one)  # and once more

    asyncio.run(main())


def test_one_that_is_used_by_a_loop_that_is_closed_is_used_by_the_next(adapter: Adapter) -> None:
    one = asyncio.run(_as_task(adapter.make()))
    asyncio.run(_as_task(adapter.run(one, "true")))
    asyncio.run(_as_task(adapter.run(one, "true")))
    asyncio.run(_as_task(adapter.end(one)))
    assert open_leases() == []


async def _as_task(work: Awaitable[Any]) -> Any:
    return await work


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.05)


def in_the_sandbox(path: str) -> bool:
    """Whether one of the sandboxes has it."""
    for sandbox_id, _ in open_leases():
        with contextlib.suppress(SandboxError):
            if Sandbox.from_id(sandbox_id, provider=PROVIDER).result(SECONDS).exists(path).result(SECONDS):
                return True
    return False


def is_running() -> bool:
    """Whether that command runs on this machine: the emulators' sandboxes are here, too."""
    wanted = b"sleep\0" + LONG.encode() + b"\0"
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if line.read_bytes() == wanted:
                return True
    return False


def interrupted(call: Callable[[str], Any]) -> None:
    """Ctrl+C in the middle of a blocking call comes out of it, and its command does not go on."""
    over = threading.Event()

    def press() -> None:
        while not over.is_set():
            if in_the_sandbox("/tmp/begun"):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.05)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call(f"touch /tmp/begun; exec sleep {LONG}")
    finally:
        over.set()
        pressing.join()
    deadline = time.monotonic() + SECONDS
    while is_running():
        assert time.monotonic() < deadline, "the command goes on"
        time.sleep(0.05)
