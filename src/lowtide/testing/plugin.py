"""The pytest plugin: sandboxes and emulators as fixtures, and a test that leaves a sandbox behind fails and names it.

Installed with lowtide and found by its entry point. A run that uses no sandbox pays for one small
import and nothing else.

* ``sandbox`` (also ``lowtide_sandbox``): a fresh sandbox for one test. ``@pytest.mark.sandbox(container_image=..., ...)``
  gives its create keywords. With ``keep="on-failure"`` (or ``LOWTIDE_KEEP=on-failure``) the sandbox of a
  failed test is kept and announced.
* ``lowtide_session``: a session for one test, closed with it.
* ``emulators``: providers' own protocols served on this machine for the length of the run, and this process's
  environment pointing at them.
* To be overridden in a conftest.py: ``lowtide_options`` (create keywords of all sandboxes), ``lowtide_emulator_names``.
* The leak check: a sandbox that a test made and that is still there after its fixtures have ended is an error
  of that test. What is left at the end of the run fails the run. ``lowtide_leaks = run`` checks only then, ``warn`` only
  tells, ``off`` is silent. The sandboxes themselves are ended by lowtide's exit hook either way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lowtide import Sandbox, Session
    from lowtide.emulators.handle import Handle

# The suite's assertions explain themselves in somebody else's test run as they do here.
pytest.register_assert_rewrite("lowtide.testing.conformance")

_failure = pytest.StashKey[BaseException]()
_starts = pytest.StashKey[list[tuple[float, str]]]()
_leaks = pytest.StashKey[list[str]]()
_wider = pytest.StashKey[set[str]]()
"""Leases made while a fixture of a wider scope than one test was set up."""
_set_ups = pytest.StashKey[list[tuple[float, float]]]()
"""When such fixtures were set up: sessions made then are theirs, whenever their sandboxes start."""

_MODES = ("error", "run", "warn", "off")
_LOOK_SECONDS = 0.02
_LOOKS = 500
"""For what is on its way, to be there or gone, when a test is over. Counted and not timed: tests stop clocks."""
_SURE_LOOKS = 10
"""Whoever gave up waiting for a sandbox has asked for its end; that it has begun shows a moment later."""


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
        "sandboxes left behind: error (default: the test's, and the run's), run (only the run's), warn, off",
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
    config.stash[_wider] = set()
    config.stash[_set_ups] = []
    if config.getini("lowtide_leaks") not in _MODES:
        raise pytest.UsageError(f"lowtide_leaks must be one of {', '.join(_MODES)}")


@pytest.fixture
def lowtide_options() -> Mapping[str, Any]:
    """Create keywords of every sandbox of a test: override it in a conftest.py, a module or a class."""
    return {}


@pytest.fixture
def lowtide_session(request: pytest.FixtureRequest, lowtide_options: Mapping[str, Any]) -> Iterator[Session]:
    """A `lowtide.Session` for one test. Its sandboxes end with the test."""
    from lowtide import Session

    provider = request.config.getoption("lowtide_provider")
    session = Session({**lowtide_options, **({"provider": provider} if provider else {})})
    session.__enter__()
    try:
        yield session
    finally:
        # The keep policy looks at how the block ended, and a fixture does not see its test's error.
        error = request.node.stash.get(_failure, None)
        session.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


@pytest.fixture
def lowtide_sandbox(request: pytest.FixtureRequest, lowtide_session: Session) -> Sandbox:
    """A fresh sandbox for one test, usable from sync and async code."""
    keywords: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers("sandbox"))):
        keywords.update(mark.kwargs)
    return lowtide_session.sandbox(**keywords)


@pytest.fixture
def sandbox(lowtide_sandbox: Sandbox) -> Sandbox:
    """`lowtide_sandbox` by the name people type first; other suites have fixtures of that name, too."""
    return lowtide_sandbox


@pytest.fixture(scope="session")
def lowtide_emulator_names() -> tuple[str, ...]:
    """Which emulators `emulators` serves: override it in a conftest.py."""
    return ("e2b",)


@pytest.fixture(scope="session")
def emulators(lowtide_emulator_names: tuple[str, ...]) -> Iterator[Handle]:
    """The emulators, and this process's environment pointing at them. Each xdist worker has its own."""
    from lowtide.testing.emulator_fixture import emulator

    with emulator(*lowtide_emulator_names, plain=True, set_environment=True) as handle:
        yield handle
        from lowtide import engine

        if engine.started():  # connections to what ends now
            from lowtide.providers import registry

            engine.engine().run(registry.aclose(), timeout=60.0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What a fixture of a wider scope makes is not its first test's."""
    if fixturedef.scope == "function":
        return (yield)
    before, began = set(_held()), _new_millisecond()
    try:
        return (yield)
    finally:
        request.config.stash[_wider] |= set(_held()) - before
        request.config.stash[_set_ups].append((began, _new_millisecond()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if item.config.getini("lowtide_leaks") != "error":
        return
    if left := _left_by_test(item.config):
        item.config.stash[_wider] |= set(left)  # said once
        pytest.fail(
            f"lowtide: left behind by {item.nodeid}: {', '.join(left.values())}. "
            "End it with a `with` block, `stop()` or `Session.close()`",
            pytrace=False,
        )


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
    item.config.stash[_starts].append((_new_millisecond(), item.nodeid))
    if _failure in item.stash:  # of the same test's run before this one
        del item.stash[_failure]


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
    elif (
        leaks
        and config.getini("lowtide_leaks") in ("error", "run")
        and session.exitstatus == pytest.ExitCode.OK
    ):
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
    from lowtide.errors import LowtideError
    from lowtide.lifecycle.lease import LeaseState
    from lowtide.lifecycle.leases import lifecycle
    from lowtide.lifecycle.owner import Owner

    if not started():
        return []
    for _ in range(_LOOKS):
        if not any(_is_on_its_way(held) for held in _held().values()):
            break
        time.sleep(_LOOK_SECONDS)
    open_states = (LeaseState.INTENDED, LeaseState.LIVE, LeaseState.ENDING)
    try:
        leases = engine().run(lifecycle().leases(states=open_states), timeout=30.0)
    except (LowtideError, TimeoutError) as error:
        # Raised here it would take the place of the run's own report.
        return [f"whether anything is left cannot be told: {error or 'the ledger does not answer'}"]
    me = Owner.current()
    lines = []
    for lease in leases:
        if lease.owner != me:
            continue
        during = [nodeid for started_at, nodeid in starts if started_at <= lease.created_at][-1:]
        where = f", made during {during[0]}" if during else ""
        lines.append(f"{lease.sandbox_id or lease.lease_id} ({lease.provider}, {lease.state}){where}")
    return lines


def _held() -> Mapping[str, Any]:
    """The leases that this process holds, by id. Asks nothing of a process that never made one."""
    if "lowtide.lifecycle.leases" not in sys.modules:
        return {}
    from lowtide.engine import started
    from lowtide.lifecycle.leases import lifecycle  # waits, where the engine's thread is still at it

    return dict(lifecycle().held) if started() else {}


def _is_on_its_way(held: Any) -> bool:
    """Whether it is still being made, or being ended: an end that failed is tried again."""
    making = held.creating is not None and not held.creating.done()
    return not held.over and (making or held.ending is not None)


def _left_by_test(config: pytest.Config) -> dict[str, str]:
    """What the last test made and is still there; an end that is under way, or only asked for, is waited for.

    What belongs to a session that was there before, or is a wider fixture's, is that session's to end.
    """
    started_at, wider = config.stash[_starts][-1][0], config.stash[_wider]
    set_ups = [(0.0, started_at), *config.stash[_set_ups]]
    left: dict[str, str] = {}
    for look in range(_LOOKS):
        left, waiting = {}, False
        for lease_id, held in _held().items():
            lease = held.lease
            if lease_id in wider or lease.created_at < started_at or held.over:
                continue
            made_at = None if lease.session is None else _made_at(lease.session)
            if made_at is not None and any(begin <= made_at < end for begin, end in set_ups):
                continue
            waiting |= _is_on_its_way(held)
            left[lease_id] = f"{lease.sandbox_id or lease_id} ({lease.provider})"
        if not left or (look >= _SURE_LOOKS and not waiting):
            break
        time.sleep(_LOOK_SECONDS)
    return left


def _new_millisecond() -> float:
    """The beginning of a millisecond in which no session was made before now: their ids tell no less."""
    now = before = int(time.time() * 1000)
    for _ in range(100 if "lowtide.session" in sys.modules else 0):  # and no more: tests stop clocks
        time.sleep(0.0001)
        now = int(time.time() * 1000)
        if now != before:
            break
    return now / 1000


def _made_at(ulid: str) -> float:
    """When a session was made, which its id says."""
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    value = 0
    for digit in ulid[:10]:
        value = value * 32 + alphabet.index(digit)
    return value / 1000
