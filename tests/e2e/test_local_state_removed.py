"""Somebody removes the state directory under live sandboxes: they end, although nothing says any more what they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.stalls import Stalls

from lowtide.providers.local import bound_groups

LOOK_SECONDS = 5.0  # as first.c has it
FACTOR = 3.0

OWNER = """
import os, shutil, sys, time
from pathlib import Path
from lowtide import Sandbox
from lowtide.providers.local.sandbox_directory import SandboxDirectory

home, command, how = Path(os.environ["LOWTIDE_HOME"]), sys.argv[1].split(), sys.argv[2]
box = Sandbox.run(*command, provider="local")
box.exec(["true"]).result(60)
outer, inner = SandboxDirectory(home / "local" / "sandboxes" / box.sandbox_id).processes()
shutil.rmtree(home, ignore_errors=True)
if how == "stop":
    box.stop().exception(60)
print(outer.pid, inner.pid, inner.alive(), flush=True)
os.kill(os.getpid(), 9)
"""


def _run(home: Path, command: str, how: str) -> tuple[list[int], bool]:
    environ = {**os.environ, "LOWTIDE_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", OWNER, command, how], env=environ, capture_output=True, text=True, check=False
    )
    outer, inner, alive = done.stdout.split()
    return [int(outer), int(inner)], alive == "True"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    # Nobody is left to know of the empty groups around its sandboxes.
    bound_groups.release(bound_groups.left_over(tmp_path / "home" / "local"), 5.0)


@pytest.mark.parametrize("command", ["", "sleep 600"], ids=["idle", "main-command"])
def test_it_ends_by_itself(home: Path, tmp_path: Path, command: str) -> None:
    pids, _ = _run(home, command, "kill")
    began, stalls = time.monotonic(), Stalls(tmp_path)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        shutil.rmtree(home, ignore_errors=True)  # a guardian on its way out writes its ledger again
        assert time.monotonic() - began < LOOK_SECONDS * FACTOR + stalls.seconds(), "it lives on"
        stalls.sleep(0.1)


def test_whoever_made_it_can_still_end_it(home: Path) -> None:
    _, alive = _run(home, "", "stop")
    assert not alive
