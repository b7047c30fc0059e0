"""The suite's own rules hold: what is never tried again is not, and too many retries fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.retries import COUNT, MOST, may_be_retried

pytest.importorskip("pytest_rerunfailures")

ROOT = Path(__file__).parents[2]

SECOND_TIME_LUCKY = """
import pathlib
import pytest

@pytest.mark.parametrize("which", range(COUNT))
def test_it(which):
    mark = pathlib.Path(__file__).with_name(f"ran-{which}")
    if not mark.exists():
        mark.touch()
        raise RuntimeError("the engine was late")
"""


@pytest.mark.parametrize(
    "nodeid",
    [
        "tests/crash/test_everywhere.py::test_terminated[docker]",
        "tests/unit/test_lifecycle.py::test_a_timeout",
        "tests/conformance/test_local.py::TestExec::test_two_streams",
        "tests/conformance/test_docker.py::TestIsolation::test_another_sandbox",
        "tests/conformance/test_e2b.py::TestLifecycle::test_it",
        "tests/e2e/test_isolation_local.py::test_it",
        "tests/e2e/test_escape.py::test_it",
        "tests/e2e/test_kubernetes.py::test_a_lost_answer_leaves_nothing",
        "tests/emulators/test_hostile_requests.py::test_it",
    ],
)
def test_what_is_about_a_promise_is_never_retried(nodeid: str) -> None:
    assert not may_be_retried(nodeid)


def test_what_waits_for_an_engine_may_be() -> None:
    assert may_be_retried("tests/conformance/test_docker.py::TestExec::test_two_streams[kill]")
    assert may_be_retried("tests/emulators/test_e2b_sdk.py::test_files_of_any_size_come_back_as_they_went")


def run(
    directory: Path, where: str, count: int, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    file = directory / where
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SECOND_TIME_LUCKY.replace("COUNT", str(count)))
    outer = {name: value for name, value in os.environ.items() if name != COUNT}  # these are not this run's
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  flaky: as in the suite\n")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.retries",
            "-p",
            "no:cacheprovider",
            *options,
            where,
        ],
        cwd=directory,
        env={**outer, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_retry_is_shown_with_its_cause_and_counted(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/emulators/test_x.py", MOST, "--reruns", "1")
    assert done.returncode == 0, done.stdout
    assert f"tried again: {MOST}, up to {MOST} are let pass" in done.stdout
    assert done.stdout.count("RuntimeError: the engine was late") >= MOST


def test_more_retries_than_allowed_fail_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/emulators/test_x.py", MOST + 1, "--reruns", "1")
    assert done.returncode == 1, done.stdout
    assert f"{MOST + 1} passed" in done.stdout
    assert "the run has failed" in done.stdout


def test_invocations_of_one_run_share_one_limit(tmp_path: Path) -> None:
    together = {COUNT: str(tmp_path / "retries")}
    first = run(tmp_path, "tests/emulators/test_x.py", MOST, "--reruns", "1", **together)
    assert first.returncode == 0, first.stdout
    calm = run(
        tmp_path, "tests/emulators/test_x.py", MOST, "--reruns", "1", **together
    )  # the marks are there
    assert calm.returncode == 0, calm.stdout
    last = run(tmp_path, "tests/emulators/test_y.py", MOST + 1, "--reruns", "1", **together)
    assert last.returncode == 1, last.stdout
    assert f"tried again: {MOST + 1}, more than {MOST}: the run has failed" in last.stdout


def test_a_retry_in_a_worker_counts_once(tmp_path: Path) -> None:
    together = {COUNT: str(tmp_path / "retries")}
    done = run(tmp_path, "tests/emulators/test_x.py", MOST, "--reruns", "1", "-n", "2", **together)
    assert done.returncode == 0, done.stdout
    assert f"tried again: {MOST}, up to {MOST} are let pass" in done.stdout
    assert len((tmp_path / "retries").read_text().splitlines()) == MOST


def test_a_crash_case_fails_at_its_first_failure_whatever_is_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/crash/test_x.py", 1, "--reruns", "5")
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout
    assert "rerun" not in done.stdout


def test_retries_cannot_be_forced(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/crash/test_x.py", 1, "--force-reruns", "5")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
