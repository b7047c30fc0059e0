"""The program of an interpreter context in Daytona's emulator, by itself: what code prints is told before its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lowtide.emulators.daytona

WORKER = Path(lowtide.emulators.daytona.__file__).with_name("worker.py")

# The pump has it, and takes its time to pass it on.
SLOW = """
import __main__, os, time
own = __main__.tell
def slow(**said):
    if said.get("text") == "child\\n":
        time.sleep(0.3)
    own(**said)
__main__.tell = slow
os.write(1, b"child\\n")
time.sleep(0.1)
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER.read_text()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def run(worker: subprocess.Popen[bytes], code: str) -> list[dict[str, Any]]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps({"code": code, "envs": {}}).encode() + b"\n")
    worker.stdin.flush()
    said: list[dict[str, Any]] = []
    while not said or said[-1]["type"] != "done":
        said.append(json.loads(worker.stdout.readline()))
    return said[:-1]


def test_what_was_read_is_told_before_the_end(worker: subprocess.Popen[bytes]) -> None:
    assert run(worker, SLOW) == [{"type": "stdout", "text": "child\n"}]


def test_every_child_is_heard_and_no_character_is_cut(worker: subprocess.Popen[bytes]) -> None:
    for _ in range(50):
        assert run(worker, "import os; os.system('echo child')") == [{"type": "stdout", "text": "child\n"}]
    said = run(worker, "import os; os.system('printf x; yes äöü 2>/dev/null | head -c 700000')")
    assert "".join(one["text"] for one in said) == "x" + "äöü\n" * 100_000
    assert run(worker, "os.close(1); os.close(2); print('still')") == [
        {"type": "stdout", "text": "still"},
        {"type": "stdout", "text": "\n"},
    ]
