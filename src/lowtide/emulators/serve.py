"""Serving emulators in this process until something ends it: a signal, a closed stdin, or the command's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lowtide import isolated
from lowtide.emulators.command import mark
from lowtide.emulators.ground import Ground, Settings
from lowtide.errors import MissingDependencyError

_LOOK_SECONDS = 0.25


def serve(
    settings: Settings,
    *,
    ready: Callable[[dict[str, Any]], None],
    command: Sequence[str] = (),
    until_stdin_closes: bool = False,
    alive: Callable[[dict[str, int]], None] | None = None,
    ended: Callable[[dict[str, int]], None] | None = None,
) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP, or run `command` with the environment set and end after it.

    `alive` hears how many sandboxes each service has, whenever that changes; `ended` how many were left, once they are
    ended. Returns the exit code: the command's, else 0.
    """
    try:
        import aiohttp
        import trustme
    except ModuleNotFoundError as error:
        install = 'pip install "lowtide[emulators]"'
        raise MissingDependencyError(f"emulators need {error.name}: {install}", install=install) from error
    del aiohttp, trustme
    left: dict[str, int] = {}
    code = asyncio.run(_serve(settings, ready, tuple(command), until_stdin_closes, alive, left))
    if ended is not None:
        ended(left)
    return code


async def _serve(
    settings: Settings,
    ready: Callable[[dict[str, Any]], None],
    command: tuple[str, ...],
    until_stdin_closes: bool,
    alive: Callable[[dict[str, int]], None] | None,
    left: dict[str, int],
) -> int:
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    caught: list[int] = []

    def on_signal(number: int) -> None:
        caught.append(number)
        end.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with Ground(settings) as ground:
            ready(ground.description())
            if until_stdin_closes:
                _watch_stdin(loop, end)
            watching = None if alive is None else asyncio.create_task(_watch(ground, alive))
            try:
                if not command:
                    await end.wait()
                    return 0
                marked = {**ground.environment(), **mark(ground.state.directory)}
                return await _run(command, marked, end, caught)
            finally:
                left.update(ground.alive())
                if watching is not None:
                    watching.cancel()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _watch(ground: Ground, alive: Callable[[dict[str, int]], None]) -> None:
    said: dict[str, int] = {}
    while True:
        found = ground.alive()
        if found != said:
            alive(found)
            said = found
        await asyncio.sleep(_LOOK_SECONDS)


async def _run(
    command: tuple[str, ...], environment: dict[str, str], end: asyncio.Event, caught: list[int]
) -> int:
    child = await asyncio.create_subprocess_exec(
        *isolated.command("lowtide.emulators.command", str(os.getpid()), *command),
        env={**os.environ, **environment},
    )
    waiting = asyncio.create_task(child.wait())
    while not waiting.done():
        ended = asyncio.create_task(end.wait())
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if end.is_set() and not waiting.done():
            end.clear()
            # Ctrl+C in a terminal has reached the command as well; it decides how to end.
            if not (caught and caught[-1] == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()):
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(caught[-1] if caught else signal.SIGTERM)
    code = waiting.result()
    return 128 - code if code < 0 else code


def _watch_stdin(loop: asyncio.AbstractEventLoop, end: asyncio.Event) -> None:
    stdin = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            end.set()

    loop.add_reader(stdin, readable)
