"""The rule for failed tests holds: each is repeated ten times alone, and one more failure fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.repeat import FAILURES, MOST_FLAKY, REPETITIONS, failures_of

ROOT = Path(__file__).parents[2]

COUNTS_ITS_RUNS = """
import pathlib
import pytest

@pytest.mark.parametrize("which", range({count}))
def test_it(which):
    runs = pathlib.Path(__file__).with_name(f"runs-{{which}}")
    number = int(runs.read_text()) + 1 if runs.exists() else 1
    runs.write_text(str(number))
    if number in {failing}:
        raise RuntimeError("the engine was late")
"""


class Run:
    """A run of a suite in a directory of its own: invocations that record their failures, then the repetitions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.failures = directory / "failures"
        (directory / "pytest.ini").write_text("[pytest]\n")

    def write(self, name: str, *, count: int = 1, failing: tuple[int, ...]) -> None:
        (self.directory / name).write_text(COUNTS_ITS_RUNS.format(count=count, failing=failing))

    def invoke(self, *arguments: str, record: bool = True) -> subprocess.CompletedProcess[str]:
        return self._python("-m", "pytest", "-q", "-p", "tests.repeat", *arguments, record=record)

    def repeat(self) -> subprocess.CompletedProcess[str]:
        return self._python("-m", "tests.repeat", str(self.failures), record=False)

    def runs(self, which: int = 0) -> int:
        return int((self.directory / f"runs-{which}").read_text())

    def _python(self, *arguments: str, record: bool) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if name != FAILURES}
        if record:
            environ[FAILURES] = str(self.failures)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env={**environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_test_that_passes_ten_times_alone_is_reported_as_flaky(run: Run) -> None:
    run.write("test_x.py", failing=(1,))
    first = run.invoke()
    assert first.returncode == 0, first.stdout
    assert f"1 failed: repeated {REPETITIONS} times alone" in first.stdout
    last = run.repeat()
    assert last.returncode == 0, last.stdout
    assert run.runs() == 1 + REPETITIONS
    assert "flaky under load: test_x.py::test_it[0]" in last.stdout
    assert "RuntimeError: the engine was late" in last.stdout


def test_one_more_failure_fails_the_run(run: Run) -> None:
    run.write("test_x.py", failing=(1, 1 + REPETITIONS))
    assert run.invoke().returncode == 0
    last = run.repeat()
    assert last.returncode == 1, last.stdout
    assert f"FAILED: test_x.py::test_it[0]: repetition {REPETITIONS} failed" in last.stdout


def test_more_flaky_tests_than_allowed_fail_the_run(run: Run) -> None:
    run.write("test_x.py", count=MOST_FLAKY + 1, failing=(1,))
    assert run.invoke("-n", "2").returncode == 0
    assert len(failures_of(run.failures)) == MOST_FLAKY + 1  # a worker's failure is recorded once
    last = run.repeat()
    assert last.returncode == 1, last.stdout
    assert f"0 failed again, {MOST_FLAKY + 1} flaky under load" in last.stdout


def test_invocations_of_one_run_share_the_record(run: Run) -> None:
    run.write("test_x.py", failing=(1,))
    run.write("test_y.py", failing=(2,))  # the same counter: the second invocation's first run is its second
    assert run.invoke("test_x.py").returncode == 0
    assert run.invoke("test_y.py").returncode == 0
    assert [failure.nodeid for failure in failures_of(run.failures)] == [
        "test_x.py::test_it[0]",
        "test_y.py::test_it[0]",
    ]


def test_a_file_that_cannot_be_collected_fails_at_once(run: Run) -> None:
    (run.directory / "test_x.py").write_text("import nothing_of_that_name")
    done = run.invoke()
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout


def test_without_a_record_a_failure_fails_its_invocation(run: Run) -> None:
    run.write("test_x.py", failing=(1,))
    done = run.invoke(record=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


def test_a_run_without_failures_passes(run: Run) -> None:
    run.write("test_x.py", failing=())
    assert run.invoke().returncode == 0
    last = run.repeat()
    assert last.returncode == 0, last.stdout
    assert "no test failed" in last.stdout
