"""The pytest plugin: a sandbox as a fixture, and a check at the end of the run that none was left.

Installed with lowtide and found by its entry point. A run that uses no sandbox pays for one small
import and nothing else.

* ``sandbox``: a fresh sandbox for one test. ``@pytest.mark.sandbox(container_image=..., ...)`` gives
  its create keywords. With ``keep="on-failure"`` (or ``LOWTIDE_KEEP=on-failure``) the sandbox of a
  failed test is kept and announced.
* ``lowtide_session``: a session for one test, closed with it.
* The leak check: what this process made and did not end by the end of the run is listed with the
  test during which it was made, and fails the run. ``lowtide_leaks = warn`` or ``off`` in the pytest
  configuration changes that. The sandboxes themselves are ended by lowtide's exit hook either way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lowtide import Sandbox, Session

# The suite's assertions explain themselves in somebody else's test run as they do here.
pytest.register_assert_rewrite("lowtide.testing.conformance")

_failure = pytest.StashKey[BaseException]()
_starts = pytest.StashKey[list[tuple[float, str]]]()
_leaks = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lowtide")
    group.addoption(
        "--lowtide-provider",
        metavar="NAME",
        default=None,
        help="the provider of the `sandbox` and `lowtide_session` fixtures (default: lowtide's own default)",
    )
    parser.addini(
        "lowtide_leaks",
        "what sandboxes left at the end of the run do: error (default), warn, off",
        default="error",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sandbox(**keywords): create keywords of the `sandbox` fixture")
    config.addinivalue_line(
        "markers", "lowtide_requires(*capabilities): skipped on a provider that does not declare them"
    )
    config.addinivalue_line(
        "markers", "lowtide_refuses(*capabilities): a test of the refusal of what a provider does not declare"
    )
    # What the conformance suite is marked with, for runs with --strict-markers.
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not here")
    config.stash[_starts] = []
    config.stash[_leaks] = []
    if config.getini("lowtide_leaks") not in ("error", "warn", "off"):
        raise pytest.UsageError("lowtide_leaks must be error, warn or off")


@pytest.fixture
def lowtide_session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A `lowtide.Session` for one test. Its sandboxes end with the test."""
    from lowtide import Session

    provider = request.config.getoption("lowtide_provider")
    session = Session({"provider": provider} if provider else None)
    session.__enter__()
    try:
        yield session
    finally:
        # The keep policy looks at how the block ended, and a fixture does not see its test's error.
        error = request.node.stash.get(_failure, None)
        session.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


@pytest.fixture
def sandbox(request: pytest.FixtureRequest, lowtide_session: Session) -> Sandbox:
    """A fresh sandbox for one test, usable from sync and async code."""
    keywords: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers("sandbox"))):
        keywords.update(mark.kwargs)
    return lowtide_session.sandbox(**keywords)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        item.stash[_failure] = call.excinfo.value
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_starts].append((time.time(), item.nodeid))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if config.getini("lowtide_leaks") == "off":
        return
    leaks = config.stash[_leaks] + _left_by_this_process(config.stash[_starts])
    config.stash[_leaks] = leaks
    output = getattr(config, "workeroutput", None)
    if output is not None:  # an xdist worker: its controller reports
        output["lowtide_leaks"] = leaks
    elif leaks and config.getini("lowtide_leaks") == "error" and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """xdist: a worker has left; take over what it found."""
    node.config.stash[_leaks].extend(getattr(node, "workeroutput", {}).get("lowtide_leaks", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    leaks = config.stash[_leaks]
    if not leaks:
        return
    terminalreporter.section("lowtide: sandboxes left by this run", red=True)
    for leak in leaks:
        terminalreporter.write_line(leak)
    terminalreporter.write_line("End them with a `with` block, `stop()` or `Session.close()`.")


def _left_by_this_process(starts: list[tuple[float, str]]) -> list[str]:
    """One line per lease that this process holds. Asks nothing of a process that never made one."""
    if "lowtide.lifecycle.leases" not in sys.modules:
        return []
    from lowtide.engine import engine, started
    from lowtide.lifecycle.lease import LeaseState
    from lowtide.lifecycle.leases import lifecycle
    from lowtide.lifecycle.owner import Owner

    if not started():
        return []
    open_states = (LeaseState.INTENDED, LeaseState.LIVE, LeaseState.ENDING)
    leases = engine().run(lifecycle().leases(states=open_states), timeout=30.0)
    me = Owner.current()
    lines = []
    for lease in leases:
        if lease.owner != me:
            continue
        during = [nodeid for started_at, nodeid in starts if started_at <= lease.created_at][-1:]
        where = f", made during {during[0]}" if during else ""
        lines.append(f"{lease.sandbox_id or lease.lease_id} ({lease.provider}, {lease.state}){where}")
    return lines
