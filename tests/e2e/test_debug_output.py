"""`lowtide --debug` on every provider: neither a key nor a value of --env is in anything that it prints or writes."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import coreweave_emulator, daytona_emulator, e2b_emulator, modal_emulator, runloop_emulator
from tests.container_engine import IMAGE, needs_docker
from tests.kubernetes_node import needs_node
from tests.lying_proxy import Answer, Forward, Lie, proxying, undone

pytestmark = pytest.mark.timeout(180)

_EMULATORS: dict[str, Any] = {
    "e2b": e2b_emulator,
    "daytona": daytona_emulator,
    "runloop": runloop_emulator,
    "modal": modal_emulator,
    "coreweave": coreweave_emulator,
}
_HOSTED = [pytest.param(name, marks=module.needs_emulator) for name, module in _EMULATORS.items()]
_PLANTED = f"planted-{secrets.token_hex(8)}"
_IDS = {"e2b": "ipow30qvs3s8fjdig8ir", "runloop": "dbx_1234567890"}
_KEYS = ("KEY", "SECRET", "TOKEN")


@pytest.mark.parametrize("provider", _HOSTED)
async def test_a_hosted_provider_prints_no_secret(provider: str, tmp_path: Path) -> None:
    """When all is well, and when an SDK cannot read the answer and quotes it in its error, which the traceback shows."""
    for handle in _EMULATORS[provider].serving():
        async with proxying(provider, handle.environment) as (proxy, environment):
            environment["LOWTIDE_CREATE_WINDOW_SECONDS"] = "1"
            run = ("run", "--provider", provider, "--env", f"PLANTED={_PLANTED}", "--", "true")
            code, output, found = await _searched(tmp_path / "well", environment, *run)
            assert (code, found) == (0, [])
            assert b" lowtide.lifecycle " in output  # lowtide's own log is there
            unreadable = _in_another_format(proxy.answers["create"][-1])
            proxy.lies = {"create": _twice(unreadable)}
            code, _, found = await _searched(tmp_path / "run", environment, *run)
            assert code != 0
            assert found == []
            proxy.lies = {"get": undone(unreadable)}
            copy = ("cp", "--provider", provider, f"{_IDS.get(provider, 'sb-1234567890')}:/etc/hostname", "-")
            code, output, found = await _searched(tmp_path / "copy", environment, *copy)
            assert code != 0
            assert b"Traceback" in output
            assert found == []


@pytest.mark.parametrize(
    "provider",
    [
        pytest.param("local"),
        pytest.param("docker", marks=needs_docker),
        pytest.param("kubernetes", marks=needs_node),
    ],
)
async def test_a_provider_on_ones_own_machines_prints_no_secret(provider: str, tmp_path: Path) -> None:
    image = () if provider == "local" else ("--image", IMAGE)
    words = ("run", "--provider", provider, "--env", f"PLANTED={_PLANTED}", *image, "--", "true")
    code, _, found = await _searched(tmp_path / "home", {}, *words)
    assert (code, found) == (0, [])


def _twice(answer: Answer) -> Lie:
    """For the create and its repetition. After that the service answers, so that the lease can be settled."""
    told = 0

    async def lie(forward: Forward) -> Answer:
        nonlocal told
        told += 1
        return answer if told <= 2 else await forward()

    return lie


def _in_another_format(answer: Answer) -> Answer:
    if not answer.body.startswith(b"{"):
        return replace(answer, body=b"\xff" + answer.body)
    read = json.loads(answer.body)
    read = {name: [value] if isinstance(value, dict) else value for name, value in read.items()}
    return replace(answer, body=json.dumps(read).encode())


async def _searched(
    home: Path, environment: Mapping[str, str], *words: str
) -> tuple[int | None, bytes, list[str]]:
    """One `lowtide --debug`: its exit code, what it printed, and where secrets are in that or in files of its state."""
    home.mkdir(mode=0o700)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lowtide", "--debug", *words),
        env={**os.environ, **environment, "LOWTIDE_HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    known = {name: value for name, value in environment.items() if any(part in name for part in _KEYS)}
    known["--env"] = _PLANTED
    assert all(len(value) > 8 for value in known.values())
    places = {"output": output}
    places |= {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()}
    return (
        process.returncode,
        output,
        [
            f"{name} in {place}: …{data[max(0, data.find(value.encode()) - 200) :][:300]!r}"
            for name, value in known.items()
            for place, data in places.items()
            if value.encode() in data
        ],
    )
