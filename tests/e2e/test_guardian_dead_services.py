"""A guardian that is told to end leaves within its time, though the services of dead owners do not answer any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests import e2b_emulator, runloop_emulator
from tests.crash.stalls import Stalls
from tests.lying_proxy import Answer, Forward, Proxy, proxying

from lowtide.lifecycle.guardian import TERM_SECONDS
from lowtide.lifecycle.guardian_link import connect

pytestmark = [pytest.mark.timeout(240), *e2b_emulator.needs_emulator, *runloop_emulator.needs_emulator]

FACTOR = 1.1
OWNER = """
import sys, time
from lowtide import Sandbox
boxes = [Sandbox.run(provider=name) for name in ("e2b", "runloop")]
for box in boxes:
    box.exec(["true"]).result(60)
print("READY", flush=True)
time.sleep(600)
"""


async def test_a_guardian_told_to_end_leaves_in_its_time_though_its_services_are_dead(tmp_path: Path) -> None:
    environ = {**os.environ, "LOWTIDE_HOME": str(tmp_path)}
    for first in e2b_emulator.serving():
        for second in runloop_emulator.serving():
            async with contextlib.AsyncExitStack() as stack:
                proxies = []
                for name, handle in (("e2b", first), ("runloop", second)):
                    proxy, through = await stack.enter_async_context(proxying(name, handle.environment))
                    proxies.append(proxy)
                    environ |= through
                guardian = await _owner_killed_with_dead_services(environ, tmp_path, proxies)
                stalls = Stalls(tmp_path)
                os.kill(guardian, signal.SIGTERM)
                began = time.monotonic()
                while os.path.exists(f"/proc/{guardian}"):
                    await asyncio.to_thread(stalls.sleep, 0.2)
                    took = time.monotonic() - began
                    assert took < TERM_SECONDS * FACTOR + stalls.seconds()
                for proxy in proxies:
                    proxy.lies.clear()
                swept = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "lowtide", "sweep"),
                    env=environ,
                    stdout=asyncio.subprocess.DEVNULL,
                )
                await asyncio.wait_for(swept.wait(), 60)
                _end_all_of(tmp_path)
                assert first.state()["sandboxes"]["e2b"] == []
                assert second.state()["sandboxes"]["runloop"] == []


async def _owner_killed_with_dead_services(environ: dict[str, str], home: Path, proxies: list[Proxy]) -> int:
    """The guardian's pid, once it waits for both services."""
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER), env=environ, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        assert await asyncio.wait_for(owner.stdout.readline(), 60) == b"READY\n"
        guardian = await asyncio.to_thread(_guardian, home)
        asked = [asyncio.Event() for _ in proxies]
        for proxy, event in zip(proxies, asked, strict=True):
            _fall_silent(proxy, event)
    finally:
        owner.kill()
        await owner.wait()
    async with asyncio.timeout(60):
        for event in asked:
            await event.wait()
    return guardian


def _fall_silent(proxy: Proxy, asked: asyncio.Event) -> None:
    async def silent(forward: Forward) -> Answer:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    proxy.lies |= dict.fromkeys(("", "create", "get", "list", "destroy"), silent)


def _end_all_of(home: Path) -> None:
    """Workers of the guardian may wait for the next one, which this home will not have."""
    mark = f"LOWTIDE_HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _guardian(home: Path) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        link = connect(home)
        if link is not None:
            with link:
                link.settimeout(5)
                link.sendall(b'{"status": true}\n')
                if data := link.recv(65536):
                    return int(json.loads(data)["pid"])
        time.sleep(0.05)
    raise AssertionError("no guardian")
