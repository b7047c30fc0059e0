"""What an emulator puts before a Python program's own start harms no program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide.emulators

START = Path(lowtide.emulators.__file__).parent / "python_start" / "sitecustomize.py"


@pytest.mark.parametrize("order", ["one two theirs", "theirs one two", "one one theirs", "one theirs two"])
def test_a_programs_own_start_runs_once_also_behind_those_of_two_installations(
    tmp_path: Path, order: str
) -> None:
    for name in ("one", "two", "theirs"):
        (tmp_path / name).mkdir()
        shutil.copy(START, tmp_path / name)
    (tmp_path / "theirs" / "sitecustomize.py").write_text("print('theirs')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import sitecustomize; print(sitecustomize.__file__)"],
        env={**os.environ, "PYTHONPATH": ":".join(str(tmp_path / name) for name in order.split())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    theirs = str(tmp_path / "theirs" / "sitecustomize.py")
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, ["theirs", theirs], "")
