"""Ctrl+C at a shell's command: a loop of short processes ends, and what takes it as it likes gets it once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.actionserver.terminal import Terminal


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(str(tmp_path / "session"), str(tmp_path), dict(os.environ))
    yield made
    made.close(1.0)


def test_a_loop_of_short_processes_ends_at_once(terminal: Terminal) -> None:
    for _ in range(25):  # without a second press about one in ten goes on
        assert terminal.run("while true; do sleep 0.005; done; echo behind", soft=0.1, hard=None).running
        ended = terminal.send("C-c", soft=None, hard=20.0)
        assert ended is not None
        assert (ended.running, ended.exit_code) == (False, 130)


def test_what_ends_itself_at_the_first_is_not_followed_by_a_second(terminal: Terminal) -> None:
    command = "sh -c 'trap \"exit 0\" INT; echo ready; while :; do sleep 0.1; done'; sleep 0.5; echo behind"
    assert terminal.run(command, soft=1.6, hard=None).running
    ended = terminal.send("C-c", soft=None, hard=20.0)
    assert ended is not None
    assert (ended.running, ended.exit_code) == (False, 0)
    assert "behind" in ended.text
