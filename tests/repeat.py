"""What happens to a failed test in a long run: it is repeated ten times alone, and fails the run if it fails once more.

A run of several pytest invocations sets `LOWTIDE_TEST_FAILURES` to a file. Each invocation appends its failed tests to
that file instead of failing, and `python -m tests.repeat FILE` decides at the end of the run:

* A test that fails once more in ten repetitions fails the run.
* A test that passes ten times is reported as "flaky under load", with the output of its first failure.
* More than three flaky tests fail the run.

The rule is the same for every test: ten repetitions find a fault that shows one time in three in 98 runs of 100.
Collection errors, an interrupted run and anything left behind fail the invocation at once.
Without the variable, a failed test fails its invocation, as always with pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

FAILURES = "LOWTIDE_TEST_FAILURES"  # the file that the invocations of one run append their failed tests to
REPETITIONS = 10
MOST_FLAKY = 3
BUDGET_SECONDS = 1200.0  # for all repetitions of a run; a test that was not repeated counts as failed


class Failure(NamedTuple):
    """One failed test of one invocation."""

    nodeid: str
    python: str
    output: str


class FailureRecorder:
    """The pytest plugin: collects failed tests in the process that reports, and appends them to the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._output: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._output.setdefault(report.nodeid, []).append(f"({report.when})\n{report.longreprtext}")

    @pytest.hookimpl(
        tryfirst=True
    )  # before the suite's own look for what was left, which may still fail the run
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not self._output:
            return
        with self._path.open("a") as file:
            for nodeid, parts in self._output.items():
                file.write(json.dumps(Failure(nodeid, sys.executable, "\n".join(parts))._asdict()) + "\n")
        session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._output:
            terminalreporter.section(
                f"{len(self._output)} failed: repeated {REPETITIONS} times alone at the end of the run",
                yellow=True,
            )


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(FAILURES)
    if path and not hasattr(config, "workerinput"):  # a worker's reports reach the controller
        config.pluginmanager.register(FailureRecorder(Path(path)), "lowtide-failure-recorder")


def failures_of(path: Path) -> list[Failure]:
    """The recorded failures, each test of each Python once."""
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[tuple[str, str], Failure] = {}
    for line in lines:
        failure = Failure(**json.loads(line))
        found.setdefault((failure.nodeid, failure.python), failure)
    return list(found.values())


def repeat(path: Path) -> int:
    """Repeat every recorded failure and return the exit status of the whole run."""
    failures = failures_of(path)
    if not failures:
        print("repeat: no test failed")
        return 0
    end = time.monotonic() + BUDGET_SECONDS
    failed: list[str] = []
    flaky: list[Failure] = []
    for failure in failures:
        again = _first_failure(failure, end)
        if again is None:
            flaky.append(failure)
            print(
                f"repeat: flaky under load: {failure.nodeid} passed {REPETITIONS} times alone; first failure:"
            )
            print(failure.output)
        else:
            failed.append(failure.nodeid)
            print(f"repeat: FAILED: {failure.nodeid}: {again}")
            print(f"repeat: its first failure was:\n{failure.output}")
    print(f"repeat: {len(failed)} failed again, {len(flaky)} flaky under load")
    if len(flaky) > MOST_FLAKY:
        print(f"repeat: more than {MOST_FLAKY} flaky tests fail the run")
    return 1 if failed or len(flaky) > MOST_FLAKY else 0


def _first_failure(failure: Failure, end: float) -> str | None:
    """Run the test alone up to ten times, each in a pytest of its own; what its first failure printed, if any."""
    environ = {name: value for name, value in os.environ.items() if name != FAILURES}
    for repetition in range(1, REPETITIONS + 1):
        left = end - time.monotonic()
        if left <= 0:
            return f"not repeated {REPETITIONS} times within {BUDGET_SECONDS:.0f} s for all tests"
        try:
            done = subprocess.run(
                [
                    failure.python,
                    "-m",
                    "pytest",
                    "-q",
                    "--no-header",
                    "-p",
                    "no:cacheprovider",
                    failure.nodeid,
                ],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=left + 60,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"repetition {repetition} did not end"
        if done.returncode != 0:
            return f"repetition {repetition} failed:\n{done.stdout}"
    return None


if __name__ == "__main__":
    sys.exit(repeat(Path(sys.argv[1])))
