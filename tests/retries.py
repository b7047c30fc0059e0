"""Which tests may be tried again: few, said aloud, and never one about a promise.

`make test-all` tries what failed once more (`--reruns`), because engines and emulators on a busy machine may miss a
time limit. A test that is about isolation, leaks, crashes or wrongful ends is never tried again: an escape that works
one time in three would be green. So only what talks to an engine or an emulator may be, and of that nothing whose
name speaks of such things. Each retry is shown with its cause; more than `MOST` fail the run.
"""

from __future__ import annotations

import re

import pytest

MOST = 3

MAY_BE = re.compile(r"tests/(emulators/|e2e/|conformance/test_(docker|podman|kubernetes|e2b|daytona)\.py)")
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
    if reporter is not None and len(_retried(reporter)) > MOST:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if again := _retried(terminalreporter):
        many = len(again) > MOST
        verdict = f"more than {MOST}: the run has failed" if many else f"up to {MOST} are let pass"
        terminalreporter.section(f"tried again: {len(again)}, {verdict}", red=many, yellow=not many)
        for report in again:
            terminalreporter.write_line(f"{report.nodeid} ({report.when}):\n{report.longreprtext}\n")


def _retried(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    return list(reporter.stats.get("rerun", []))
