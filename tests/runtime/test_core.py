"""The action server's core without I/O: bounded output, the shell's protocol, edits, actions and observations."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowtide.actionserver
from lowtide.actionserver import bundle, models
from lowtide.actionserver.edit import EditError, Editor
from lowtide.actionserver.models import (
    Action,
    Edit,
    InvalidAction,
    Metadata,
    Observation,
    Run,
    RunObservation,
)
from lowtide.actionserver.output import HeadTail, text
from lowtide.actionserver.shell import Shell

PACKAGE = Path(lowtide.actionserver.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "bundle.py")


# Output in bounded memory.


def test_output_that_fits_is_kept_whole() -> None:
    output = HeadTail(10, 20)
    for piece in (b"one\n", b"two\n", b"three\n"):
        output.append(piece)
    assert output.take() == (b"one\ntwo\nthree\n", 0, b"")
    assert output.take() == (b"", 0, b"")


@given(st.lists(st.binary(max_size=40), max_size=60))
def test_output_keeps_beginning_and_end_and_counts_the_rest(pieces: list[bytes]) -> None:
    output = HeadTail(16, 32)
    for piece in pieces:
        output.append(piece)
        assert len(output._head) + len(output._tail) <= 16 + 2 * 32 + 40
    head, dropped, tail = output.take()
    whole = b"".join(pieces)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) + dropped + len(tail) == len(whole)


def test_output_says_how_much_is_left_out_between_whole_lines() -> None:
    output = HeadTail(10, 10)
    output.append(b"aaa\nbbb\nccccccccccccccc\nyyy\nzzz\n")
    shown = text(output.take())
    assert shown.startswith("aaa\nbbb\n[... ")
    assert shown.endswith("yyy\nzzz\n")
    assert "bytes of output left out here" in shown


# The shell's protocol.


def prompt(kind: str = "p", status: int = 0, cwd: str = "/w", number: int = 1) -> bytes:
    return f"\x1enonce;{kind};{number};{status};42;{cwd}\x1f".encode()


def started() -> Shell:
    shell = Shell("/d", "nonce", "/w")
    assert shell.feed(b"noise of start-up files\n" + prompt(), 0.0) == b""
    return shell


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_output_before_the_mark_is_the_commands_however_it_is_cut(noise: bytes, cuts: list[int]) -> None:
    shell = started()
    shell.begin("x", 1.0)
    stream = noise + prompt(status=3, cwd="/a b")
    shown = b""
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for begin, end in pairwise(edges):
        shown += shell.feed(stream[begin:end], 2.0)
    outcome = shell.outcome(2.0, 1.0, None, None)
    assert outcome is not None
    assert shown == noise
    assert (outcome.running, outcome.exit_code, outcome.cwd, outcome.seconds) == (False, 3, "/a b", 1.0)
    assert outcome.text == noise.decode("utf-8", "replace")


def test_a_prompt_from_before_the_command_does_not_end_it() -> None:
    shell = started()
    shell.begin("make", 0.0)
    shell.feed(prompt(status=5, number=0), 1.0)
    assert shell.outcome(1.0, 0.0, None, None) is None
    shell.feed(prompt(status=6, number=1), 2.0)
    outcome = shell.outcome(2.0, 0.0, None, None)
    assert outcome is not None
    assert outcome.exit_code == 6


def test_silence_and_the_hard_limit_end_the_waiting_and_not_the_command() -> None:
    shell = started()
    shell.begin("make", 0.0)
    shell.feed(b"one\n", 4.0)
    assert shell.outcome(5.0, 0.0, 3.0, 10.0) is None
    assert shell.due(0.0, 3.0, 10.0) == 7.0
    silent = shell.outcome(7.0, 0.0, 3.0, 10.0)
    assert silent is not None
    assert silent.running
    assert silent.exit_code == -1
    assert silent.text == "one\n"
    assert "no new output for 3 seconds" in silent.suffix
    assert "C-c" in silent.suffix
    shell.feed(b"two\n", 9.0)
    late = shell.outcome(20.0, 10.0, None, 10.0)
    assert late is not None
    assert late.text == "two\n"
    assert late.prefix
    assert shell.command == "make"


def test_an_end_that_nobody_saw_is_told_by_the_next_look_or_command() -> None:
    shell = started()
    shell.begin("make", 0.0)
    assert shell.outcome(1.0, 0.0, None, 1.0) is not None  # the waiting ended
    shell.feed(b"last words\n" + prompt(status=3), 2.0)
    assert shell.pending
    shell.begin("ls", 3.0)
    shell.feed(b"a\n" + prompt(status=0, number=2), 4.0)
    outcome = shell.outcome(4.0, 3.0, None, None)
    assert outcome is not None
    assert outcome.text == "a\n"
    assert "ended with exit code 3" in outcome.prefix
    assert "last words" in outcome.prefix


def test_a_command_that_could_not_be_handed_over_leaves_the_shell_as_it_was() -> None:
    shell = started()
    shell.begin("make", 0.0)
    assert shell.outcome(1.0, 0.0, None, 1.0) is not None  # the waiting ended
    shell.feed(b"last words\n" + prompt(status=3), 2.0)
    shell.begin("ls", 3.0)
    shell.take_back()
    assert shell.at_prompt
    assert shell.command is None
    outcome = shell.outcome(4.0, 3.0, None, None)
    assert outcome is not None
    assert (outcome.exit_code, outcome.text) == (3, "last words\n")


def test_an_orderly_exit_is_told_from_a_shell_that_was_replaced() -> None:
    shell = started()
    shell.begin("exit 7", 0.0)
    shell.feed(b"bye\nexit\n" + prompt("g", 7), 1.0)
    assert shell.ended(7, 1.0) is True
    left = shell.outcome(1.0, 0.0, None, None)
    assert left is not None
    assert (left.exit_code, left.text, left.suffix) == (7, "bye\n", "")

    shell = started()
    shell.begin("exec false", 0.0)
    assert shell.ended(1, 1.0) is False
    replaced = shell.outcome(1.0, 0.0, None, None)
    assert replaced is not None
    assert replaced.exit_code == 1
    assert "A new one starts in /w" in replaced.suffix


# Edits.


def edit(command: str, **keywords: object) -> Edit:
    return Edit(command=command, path="/f", **keywords)  # type: ignore[arg-type]


def test_str_replace_changes_the_one_place_and_shows_it() -> None:
    edited = Editor().apply(edit("str_replace", old_str="two", new_str="2"), "/f", "one\ntwo\nthree\n")
    assert edited.text == "one\n2\nthree\n"
    assert "     2\t2" in edited.message


@pytest.mark.parametrize(
    ("change", "old", "said"),
    [
        (edit("str_replace", old_str="x", new_str="y"), "x\nx\n", "lines 1, 2"),
        (edit("str_replace", old_str="z", new_str="y"), "x\n", "does not occur"),
        (edit("str_replace", old_str="x", new_str="x"), "x\n", "nothing would change"),
        (edit("str_replace", old_str="x", new_str="y"), None, "create it first"),
        (edit("create", file_text="a"), "b", "exists already"),
        (edit("create"), None, "file_text"),
        (edit("insert", insert_line=3, new_str="y"), "x\n", "between 0 and 1"),
        (edit("view", view_range=[2, 1]), "x\ny\n", "view_range"),
        (edit("undo_edit"), "x", "no edit"),
        (edit("delete"), "x", "known are"),
    ],
)
def test_an_edit_that_cannot_be_made_says_what_to_do(change: Edit, old: str | None, said: str) -> None:
    with pytest.raises(EditError, match=said):
        Editor().apply(change, "/f", old)


@pytest.mark.parametrize(("line", "new"), [(0, "0\na\nb\n"), (1, "a\n0\nb\n"), (2, "a\nb\n0\n")])
def test_insert_puts_lines_behind_the_line_named(line: int, new: str) -> None:
    assert Editor().apply(edit("insert", insert_line=line, new_str="0"), "/f", "a\nb\n").text == new


def test_undo_takes_back_edits_one_by_one_to_the_creation() -> None:
    editor, current = Editor(), None
    for change in (edit("create", file_text="a\n"), edit("str_replace", old_str="a", new_str="b")):
        edited = editor.apply(change, "/f", current)
        editor.done(change, "/f", current, edited)
        current = edited.text
    undo = edit("undo_edit")
    edited = editor.apply(undo, "/f", current)
    assert edited.text == "a\n"
    editor.done(undo, "/f", current, edited)
    edited = editor.apply(undo, "/f", "a\n")
    assert edited.remove


# Actions and observations.


def test_an_action_survives_json() -> None:
    action = Run(command="ls", timeout=3.0, session="second", is_static=True)
    assert Action.from_json(action.to_json()) == action


def test_arguments_of_a_newer_client_are_ignored() -> None:
    action = Action.from_json({"action": "run", "args": {"command": "ls", "invented_later": 1}, "timeout": 5})
    assert action == Run(command="ls", timeout=5)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"action": "fly"},
        {"action": ["run"]},
        {"action": "run", "args": {}},
        {"action": "run", "args": {"command": 3}},
        {"action": "run", "args": {"command": "a\0b"}},
        {"action": "run", "args": {"command": "ls", "is_input": "yes"}},
        {"action": "run", "args": {"command": "ls"}, "timeout": -1},
        {"action": "run", "args": {"command": "ls"}, "version": 99},
        {"action": "read", "args": {"path": "x", "start": "0"}},
    ],
)
def test_an_action_that_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidAction):
        Action.from_json(wrong)


def test_an_observation_survives_json_in_the_shape_clients_know() -> None:
    seen = RunObservation(content="hi\n", command="echo hi", metadata=Metadata(exit_code=0, working_dir="/w"))
    shape = seen.to_json()
    assert shape["observation"] == "run"
    assert shape["extras"]["metadata"]["exit_code"] == 0
    assert shape["success"] is True
    assert Observation.from_json(shape) == seen
    assert seen.exit_code == 0


def test_every_kind_has_a_model() -> None:
    assert set(models.ACTIONS) == {
        "run",
        "run_ipython",
        "read",
        "write",
        "edit",
        "list",
        "upload",
        "download",
    }
    assert set(models.OBSERVATIONS) == {*models.ACTIONS, "error"}


# One file, Python 3.9.


def test_what_runs_inside_is_python_3_9() -> None:
    for path in SOURCES:
        ast.parse(path.read_text(), str(path), feature_version=(3, 9))
    vermin = Path(sys.executable).with_name("vermin")
    # For the type checker alone, behind TYPE_CHECKING.
    options = ["--no-tips", "--violations", "--exclude", "typing.dataclass_transform", "-t=3.9-"]
    checked = subprocess.run([vermin, *options, *SOURCES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_what_runs_inside_imports_nothing_but_itself_and_the_standard_library() -> None:
    # The kernel's driver imports jupyter where the image has it, and says so where not.
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                ours = name.startswith("lowtide.actionserver")
                known = top in sys.stdlib_module_names or ours
                assert known or (path.name == "kernel.py" and top in ("ipykernel", "jupyter_client")), (
                    path,
                    name,
                )


def test_the_one_file_is_the_same_every_time() -> None:
    first = bundle.bundle()
    bundle.bundle.cache_clear()
    assert bundle.bundle() == first
    assert first.name.endswith(".pyz")
