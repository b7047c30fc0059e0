"""Somebody's Daytona program under `lowtide emulate daytona -- …`: found by the environment alone, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("daytona")

# The shape of Daytona's own first examples: no key, no address, the sync and the async client.
SYNC = """
from daytona import Daytona
daytona = Daytona()
sandbox = daytona.create()
response = sandbox.process.code_run('print("Sum of 3 and 4 is", 3 + 4)')
print(response.exit_code, response.result)
print(sandbox.process.exec("echo 'Hello, World!'", cwd="/home/daytona", timeout=10).result)
daytona.delete(sandbox)
"""
ASYNC = """
import asyncio
from daytona import AsyncDaytona, CreateSandboxFromImageParams, Image, Resources

async def main():
    async with AsyncDaytona() as daytona:
        sandbox = await daytona.create(
            CreateSandboxFromImageParams(image=Image.debian_slim("3.12"), resources=Resources(cpu=1)),
            timeout=60, on_snapshot_create_logs=lambda line: print("build:", line))
        print((await sandbox.process.exec("echo 'Hello, World!'")).result)
        # and forgets to delete it

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [pytest.param(SYNC, "Sum of 3 and 4 is 7", marks=pytest.mark.newcomer), (ASYNC, "#3 [1/")],
)
def test_a_first_program_runs_as_it_is(tmp_path: Path, text: str, expected: str) -> None:
    script, home = tmp_path / "their_script.py", tmp_path / "home"
    script.write_text(text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DAYTONA_")}
    done = subprocess.run(
        ["lowtide", "emulate", "daytona", "--", sys.executable, str(script)],
        env={
            **environment,
            "LOWTIDE_HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert "Hello, World!" in done.stdout
    assert list((home / "emulators").iterdir()) == []
