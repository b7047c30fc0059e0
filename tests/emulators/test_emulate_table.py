"""What `lowtide emulate` shows: how many sandboxes there are, as it changes, and how many were left to end."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.cli.commands import emulate

pytest.importorskip("e2b")
CREATE = "from e2b import Sandbox; s = Sandbox.create(); print(s.sandbox_id)"


def lowtide(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lowtide", *arguments]


def test_a_command_that_leaves_sandboxes_is_told_how_many(tmp_path: Path) -> None:
    done = subprocess.run(
        lowtide("emulate", "e2b", "--plain", "--", sys.executable, "-c", CREATE),
        env={**os.environ, "LOWTIDE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1:] == [
        "lowtide emulate: sandboxes alive when the command ended, and ended: 1 of e2b"
    ]
    nothing = subprocess.run(
        lowtide("emulate", "e2b", "--plain", "--", "true"),
        env={**os.environ, "LOWTIDE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (nothing.returncode, nothing.stderr) == (0, "")


def test_in_a_terminal_the_table_follows_the_sandboxes(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    serving = subprocess.Popen(
        lowtide("emulate", "e2b", "--plain"),
        env={**os.environ, "LOWTIDE_HOME": str(tmp_path), "COLUMNS": "200", "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    assert serving.stdout is not None
    shown = ""

    def until(pattern: str) -> None:
        nonlocal shown
        end = time.monotonic() + 120
        while not re.search(pattern, shown):
            assert time.monotonic() < end, shown
            if select.select([terminal], [], [], 1)[0]:
                try:
                    shown += os.read(terminal, 65_536).decode(errors="replace")
                except OSError:  # the other end has left
                    assert re.search(pattern, shown), shown
                    return

    try:
        given: dict[str, str] = {}
        while {"E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN"} - given.keys():
            name, _, value = shlex.split(serving.stdout.readline())[1].partition("=")
            given[name] = value
        until(r"e2b +http\S+ +E2B_.* 0 *\r?\n")
        subprocess.run([sys.executable, "-c", CREATE], env={**os.environ, **given}, check=True, timeout=120)
        until(r"e2b +http\S+ +E2B_.* 1 *\r?\n")
        serving.send_signal(signal.SIGINT)
        until(r"sandboxes alive at the end, and ended: 1 of e2b")
        assert serving.wait(60) == 0
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()
        os.close(terminal)


def test_a_log_that_nobody_reads_is_no_reason_not_to_answer(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            lowtide(
                "emulate",
                "e2b",
                "--plain",
                "--log",
                "--",
                sys.executable,
                "-c",
                f"{CREATE}; s.kill(); exit(7)",
            ),
            env={**os.environ, "LOWTIDE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=writer,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert (done.returncode, bool(done.stdout.strip())) == (7, True)


def test_the_table_is_there_at_once_where_nothing_can_move_and_fits_where_it_is_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {
        "providers": {"e2b": "http://127.0.0.1:40000"},
        "environment": {"E2B_API_KEY": "x", "HTTPS_PROXY": "y"},
        "admin": {"url": "http://127.0.0.1:40001/_lowtide"},
        "network": "none",
    }
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes it a terminal
    for terminal, columns, moves in (("xterm", "120", True), ("xterm", "50", True), ("dumb", "120", False)):
        monkeypatch.setenv("TERM", terminal)
        monkeypatch.setenv("COLUMNS", columns)
        table = emulate._Table(5, moving=True)
        assert table.moves is moves
        table.show(described)
        shown = capsys.readouterr().err  # before its end, which shows it once more
        table.close()
        capsys.readouterr()
        assert "http://127.0.0.1:40000" in shown
        assert ("E2B_API_KEY" in shown) is (columns == "120")
