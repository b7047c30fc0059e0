"""Interpreters whose code works against the driver it runs in: each answer belongs to its own code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.actionserver.interpreter import Interpreters

LONG = 60.0


class Runner:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.interpreters = Interpreters(str(place), {"PATH": "/usr/bin:/bin", "HOME": str(place)})

    def __call__(self, code: str, language: str = "python", seconds: float = LONG) -> dict[str, Any]:
        return self.interpreters.run(
            code, language=language, context="one", cwd=str(self.place), seconds=seconds
        )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.interpreters.close()


def plain(ran: dict[str, Any]) -> Any:
    return [bundle["text/plain"] for bundle in ran["results"]]


def test_code_that_closes_the_drivers_pipes_and_runs_on_has_its_time(run: Runner) -> None:
    run("1")
    ran = run("import os, time\nos.closerange(3, 1000)\ntime.sleep(1000)", seconds=0.5)
    assert ran["timed_out"]
    assert ran["error"]["name"] == "InterpreterEnded"
    assert plain(run("2")) == ["2"]


def test_a_child_that_code_forgets_answers_for_nobody(run: Runner) -> None:
    assert plain(run("import os\nos.fork()\n1")) == ["1"]
    assert [plain(run(str(number))) for number in (2, 3)] == [["2"], ["3"]]


def test_an_answer_that_code_forges_ends_its_interpreter(run: Runner) -> None:
    forge = "import os\nfor fd in range(3, 4096):\n  try: os.write(fd, b'{!r}\\n')\n  except OSError: pass"
    for said in ("nonsense", '{"results": 5}', "[]"):
        assert run(forge.replace("{!r}", said))["error"]["name"] == "InterpreterEnded"
        assert plain(run("5")) == ["5"]


def test_what_is_no_text_among_results_is_shown_as_text(run: Runner) -> None:
    ran = run("kept = 1\nclass A:\n  def _repr_html_(self): return 5\nA()")
    assert ran["results"][0]["text/html"] == "5"
    assert plain(run("kept")) == ["1"]


def test_a_bash_that_ends_is_not_waited_for_because_of_its_jobs(run: Runner) -> None:
    run("sleep 1000 & echo $! >job", "bash")
    ran = run("set -e; false", "bash")
    assert (ran["timed_out"], ran["error"]["value"]) == (False, "1")
    os.kill(int((run.place / "job").read_text()), 9)


def test_a_nul_in_code_for_bash_is_left_out_as_bash_does(run: Runner) -> None:
    assert run("echo a\0b", "bash")["stdout"] == "ab\n"
    assert run("echo c", "bash")["stdout"] == "c\n"
    assert run("echo '\ud800' >/dev/null; echo d", "bash")["stdout"] == "d\n"


def test_a_directory_with_a_quote_is_entered_by_bash(run: Runner) -> None:
    run("true", "bash")
    run.place = run.place / "it's"
    run.place.mkdir()
    assert run("pwd", "bash")["stdout"] == f"{run.place}\n"
