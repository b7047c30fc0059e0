"""The command line as a real process, for the tests of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

LOWTIDE = [sys.executable, "-m", "lowtide"]


class Cli:
    """Runs `lowtide …` with a state directory of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {**os.environ, "LOWTIDE_HOME": str(home)}

    def __call__(
        self, *arguments: str, input: bytes | str | None = None, timeout: float = 120, **environ: str
    ) -> subprocess.CompletedProcess[bytes]:
        payload = input.encode() if isinstance(input, str) else input
        return subprocess.run(
            [*LOWTIDE, *arguments],
            input=payload,
            stdin=subprocess.DEVNULL if payload is None else None,
            capture_output=True,
            env={**self.environ, **environ},
            timeout=timeout,
        )

    def json(self, *arguments: str, **environ: str) -> Any:
        done = self(*arguments, "--json", **environ)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """A process to talk to; the caller ends it."""
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(
            [*LOWTIDE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environ,
            **options,
        )

    def python(self, program: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """A program of a user's, under the same state directory."""
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self.environ,
            **options,
        )

    def ids(self) -> list[str]:
        return [row["id"] for row in self.json("ls")]


@pytest.fixture
def cli() -> Iterator[Cli]:
    """A command line whose ledger nobody else uses; every sandbox left in it fails the test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # the suite runs in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    home = Path(os.environ["LOWTIDE_HOME"]) / f"cli-{os.urandom(4).hex()}"
    home.mkdir(mode=0o700)
    command = Cli(home)
    yield command
    left = command.ids()
    if left:
        command("rm", *left)
    assert left == []


def one_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """Standard error, which has to be a single line that begins with the program's name."""
    text = done.stderr.decode()
    assert text.startswith("lowtide: "), text
    assert text.count("\n") == 1, text
    return text


def words(text: bytes) -> Sequence[str]:
    return text.decode().split()
