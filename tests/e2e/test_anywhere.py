"""The same script runs on every provider by changing one word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "anywhere.py"


def run(provider: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), provider],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(provider: str, output: str) -> None:
    lines = output.splitlines()
    assert lines[0] == f"{provider}: 42"
    assert lines[1] == f"{provider}: exit code 3, stderr 'oops'"
    assert "sum.py" in lines[2]


def test_the_script_is_short() -> None:
    code = [line for line in SCRIPT.read_text().splitlines() if line.strip()]
    assert len(code) <= 15


def test_local() -> None:
    check("local", run("local"))


@pytest.mark.engine
@pytest.mark.parametrize(("provider", "variable"), [("docker", "DOCKER_HOST"), ("kubernetes", "KUBECONFIG")])
def test_on_an_engine(provider: str, variable: str) -> None:
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set: no {provider} engine here")
    check(provider, run(provider, LOWTIDE_IMAGE=os.environ["LOWTIDE_TEST_IMAGE"]))


@pytest.mark.parametrize("provider", ["e2b", "daytona"])
def test_on_an_emulator(provider: str) -> None:
    pytest.importorskip(provider)
    from lowtide.testing import emulator

    with emulator(provider) as running:
        check(provider, run(provider, **running.environment))
