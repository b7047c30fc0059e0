"""A session's bash against what commands do to it: each next command still runs, once, and tells the truth."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.actionserver.descriptors import readable
from lowtide.actionserver.output import Pieces
from lowtide.actionserver.shell import Outcome, Shell
from lowtide.actionserver.terminal import InputFull, NoShell, Terminal


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def bash(home: Path) -> Iterator[Terminal]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    made = Terminal(str(home / "session"), str(home), environment)
    yield made
    made.close(1.0)


def run(bash: Terminal, command: str, seconds: float = 60.0) -> Outcome:
    return bash.run(command, soft=None, hard=seconds)


@pytest.mark.parametrize(
    "command",
    [
        "exec 0</dev/null",
        "exec 0<&-",
        "echo 'echo run by mistake' >f; exec <f",
        "eval() { :; }",
        "read() { echo mine; }",
        "readonly PROMPT_COMMAND",
        "set -u; unset PWD",
        "__lt_m p nonsense",
        "__lt_m 'x;y' ''",
        "rm -rf session",
    ],
)
def test_the_next_command_runs(bash: Terminal, command: str) -> None:
    assert run(bash, command).exit_code == 0
    seen = run(bash, "echo here")
    assert (seen.running, seen.exit_code, seen.text) == (False, 0, "here\n")
    assert (run(bash, "(exit 7)").exit_code, run(bash, "echo again").text) == (7, "again\n")


def test_half_a_character_is_no_command(bash: Terminal) -> None:
    with pytest.raises(UnicodeEncodeError):
        run(bash, "echo \ud800")
    assert run(bash, "echo whole").text == "whole\n"


def test_a_refused_command_takes_no_output_from_the_one_that_waits(bash: Terminal) -> None:
    seen: list[Outcome] = []
    waiting = threading.Thread(target=lambda: seen.append(run(bash, "echo first; read line; echo $line")))
    waiting.start()
    while not bash.shell._output:
        time.sleep(0.005)
    refused = run(bash, "echo second")
    assert (refused.running, refused.text) == (True, "")
    assert "was not run" in refused.suffix
    bash.send("last", soft=None, hard=0.0)
    waiting.join(60)
    assert (seen[0].exit_code, seen[0].text) == (0, "first\nlast\n")


def test_a_refused_command_shows_what_nobody_waits_for(bash: Terminal) -> None:
    assert run(bash, "sleep 0.2; echo first; sleep 1000", 0.0).running
    while not bash.shell._output:
        time.sleep(0.005)
    assert run(bash, "echo second").text == "first\n"
    assert bash.interrupt(10.0)


def test_a_line_too_long_for_the_terminal_is_refused_and_not_cut(bash: Terminal) -> None:
    assert run(bash, "read line; echo ${#line}", 0.1).running
    with pytest.raises(InputFull, match="4094 bytes"):
        bash.send("a" * 5000, soft=None, hard=60.0)
    seen = bash.send("a" * 4000, soft=None, hard=60.0)
    assert seen is not None
    assert seen.text == "4000\n"


def test_start_up_files_that_end_bash_are_named_and_not_tried_for_ever(home: Path) -> None:
    (home / ".bashrc").write_text("echo x >>~/starts\nexit 0\n")
    bash = Terminal(str(home / "session"), str(home), {"PATH": os.environ["PATH"], "HOME": str(home)})
    try:
        with pytest.raises(NoShell, match="start-up files"):
            run(bash, "echo hi")
        assert bash.closed
        assert (home / "starts").read_text() == "x\n" * 3
    finally:
        bash.close(1.0)


def test_a_forged_beginning_of_a_mark_is_output_like_any_other() -> None:
    shell = Shell("/d", "n" * 24, "/")
    shell.feed(b"\x1e" + b"n" * 24 + b";p;0;0;1;/\x1f", 0.0)
    shell.begin("x", 0.0)
    forged = b"\x1e" + b"n" * 24 + b";"
    pieces = [forged, *[b"a" * 60_000] * 50]
    heard = b"".join(shell.feed(piece, 0.0) for piece in pieces)
    assert heard == b"".join(pieces)
    assert shell._held == b""


def test_descriptors_beyond_those_of_select_are_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this user may not have 2,000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        out, into = os.pipe()
        os.dup2(out, 1500)
        assert readable([1500], 0.0) == []
        os.write(into, b"x")
        assert readable([1500], None) == [1500]
        for descriptor in (out, into, 1500):
            os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_a_slow_listener_does_not_take_is_bounded_and_counted() -> None:
    pieces = Pieces(limit=100)
    for _ in range(50):
        pieces.put(b"0123456789")
    pieces.end("over")
    assert len(pieces._held) == 100
    taken: list[Any] = [pieces.get(), pieces.get()]
    assert taken[0].startswith(b"0123456789" * 10)
    assert b"400 bytes of output left out" in taken[0]
    assert taken[1] == "over"


def test_nothing_is_kept_for_a_listener_that_has_left() -> None:
    pieces = Pieces()
    pieces.stop()
    pieces.put(b"x" * 1000)
    assert not pieces._held
