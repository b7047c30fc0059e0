"""File calls when descriptors run short: in this process, in the spawner, and on their way between processes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.many_file_calls import CALLS
from tests.ordinary_user import OrdinaryUser, why_not

from lowtide.errors import RequestTimeoutError, ResourceExhaustedError
from lowtide.providers.local import LocalProvider, files

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import chunks, read, run, spec

ROOT = Path(__file__).parents[2]
WHOLE_SECONDS = 240.0
ALL = {"read": CALLS // 2, "write": CALLS // 2}


def scenario(command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WHOLE_SECONDS, check=False
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_hundreds_of_calls_succeed_with_few_descriptors(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.many_file_calls", "200"]
    found = scenario(command, {**os.environ, "LOWTIDE_HOME": str(tmp_path / "home")})
    assert found == {"ends": ALL, "echo": "on\n"}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_hundreds_of_calls_succeed_as_an_ordinary_user() -> None:
    """The kernel counts what is on its way for the user, against the limit of whoever sends: 1024 is the usual one."""
    with OrdinaryUser() as user:
        found = scenario(user.command("-m", "tests.many_file_calls", "1024"))
    assert found == {"ends": ALL, "echo": "on\n"}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_sandbox_that_holds_descriptors_stops_no_other_of_its_user() -> None:
    with OrdinaryUser() as user:
        found = scenario(user.command("-m", "tests.many_file_calls", "1024", "hostile"))
    assert found.pop("held") > 1024
    assert found == {"ends": ALL, "echo": "on\n"}


async def test_a_call_that_is_not_answered_ends_at_its_deadline(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = (await provider.create(spec())).sandbox_id
    await provider.write_file(sandbox, "/tmp/it", chunks(b"here"))
    client = provider._prerequisites.client
    assert client is not None
    monkeypatch.setattr(files, "_ANSWER_SECONDS", 0.5)
    os.kill(client._pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            for call in (
                read(provider, sandbox, "/tmp/it"),
                provider.write_file(sandbox, "/tmp/other", chunks(b"")),
                provider.stat(sandbox, "/tmp/it"),
                provider.make_dir(sandbox, "/tmp/folder"),
            ):
                with pytest.raises(RequestTimeoutError, match="not answered within"):
                    await call
    finally:
        os.kill(client._pid, signal.SIGCONT)
    monkeypatch.undo()
    assert await read(provider, sandbox, "/tmp/it") == b"here"


async def test_a_spawner_without_descriptors_refuses_and_goes_on(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = (await provider.create(spec())).sandbox_id
    await provider.write_file(sandbox, "/tmp/it", chunks(b"here"))
    client = provider._prerequisites.client
    assert client is not None
    pid = client._pid
    monkeypatch.setattr(files, "_AGAIN_SECONDS", 0.2)
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The numbers in use stay; the next free one is the reply of a request, and there is none for the rest.
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in range(1000) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + 1, usual[1]))
    try:
        async with asyncio.timeout(30):
            with pytest.raises(ResourceExhaustedError, match="ulimit"):
                await read(provider, sandbox, "/tmp/it")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
    assert await read(provider, sandbox, "/tmp/it") == b"here"
    assert (await run(provider, sandbox, "echo", "on"))[1] == "on\n"
    assert client._pid == pid
