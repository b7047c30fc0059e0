"""Which tests may be tried again: few, said aloud, and never one about a promise.

`make test-all` tries what failed once more (`--reruns`), because engines and emulators on a busy machine may miss a
time limit. A test that is about isolation, leaks, crashes or wrongful ends is never tried again: an escape that works
one time in three would be green. So only what talks to an engine or an emulator may be, and of that nothing whose
name speaks of such things. Each retry is shown with its cause; more than `MOST` fail the run. A run of several
invocations names a file for all of them to count in (`COUNT`), so that there is one limit and not one for each.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

MOST = 3
COUNT = "LOWTIDE_TEST_RETRIES"  # a file that has a line for each retry of the invocations before

MAY_BE = re.compile(
    r"tests/(emulators/|e2e/|conformance/test_(docker|podman|kubernetes|e2b|daytona|modal|runloop|coreweave)\.py)"
)
NEVER = re.compile(
    r"isolation|escape|hostile|leak|left|leaves|behind|gone|crash|kill|lost|end(s|ed|ing)?(_|$)|destroy|stop|close"
    r"|cancel|keep|kept|lifetime|lifecycle|lease|orphan|adopt|sweep|guardian|secret",
    re.IGNORECASE,
)


def may_be_retried(nodeid: str) -> bool:
    """Whether this test may be tried again after a failure. Its file, class and name decide, not its parameters."""
    where, _, name = nodeid.partition("::")
    return bool(MAY_BE.match(where)) and not NEVER.search(
        where.rpartition("/")[2] + "::" + name.partition("[")[0]
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("force_reruns", None) is not None:
        raise pytest.UsageError("--force-reruns would try tests of isolation and leaks again: use --reruns")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not may_be_retried(item.nodeid):
            item.add_marker(pytest.mark.flaky(reruns=0), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or _in_worker(session.config):
        return
    again = _retried(reporter)
    if again and len(again) + _before() > MOST:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    again = _retried(terminalreporter)
    if not again or _in_worker(terminalreporter.config):
        return
    count = len(again) + _before()
    many = count > MOST
    verdict = f"more than {MOST}: the run has failed" if many else f"up to {MOST} are let pass"
    terminalreporter.section(f"tried again: {count}, {verdict}", red=many, yellow=not many)
    for report in again:
        terminalreporter.write_line(f"{report.nodeid} ({report.when}):\n{report.longreprtext}\n")
    if COUNT in os.environ:
        with open(os.environ[COUNT], "a") as file:
            file.writelines(f"{report.nodeid}\n" for report in again)


def _in_worker(config: pytest.Config) -> bool:
    """A worker tells the one that counts; did it count as well, each retry would be two."""
    return hasattr(config, "workerinput")


def _retried(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    return list(reporter.stats.get("rerun", []))


def _before() -> int:
    """How many there were in the invocations before this one, where they are counted together."""
    path = Path(os.environ[COUNT]) if COUNT in os.environ else None
    return len(path.read_text().splitlines()) if path is not None and path.exists() else 0
