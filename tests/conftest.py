"""The suite's own ground: a home per worker that nobody else uses, and a last look for what was left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lowtide.testing.leaks import Leak, Watch
from lowtide.trees.remove import remove_tree
from tests import repeat, selection

RUN = "LOWTIDE_TEST_RUN"  # the run's directory, handed by the controller to its workers
SEED = "LOWTIDE_CRASH_SEED"  # what random kills are drawn from; given, they are drawn again
PATIENCE_SECONDS = 45.0  # a guardian may still be ending what a killed test process left

_left = pytest.StashKey[list[Leak]]()
_outer = pytest.StashKey[dict[str, str | None]]()


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for rule in (selection, repeat):
        config.pluginmanager.register(rule)
    config.stash[_left] = []
    # A shell starts what runs in its background with Ctrl+C ignored, and every process of a test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_outer] = {name: os.environ.get(name) for name in (RUN, SEED, "LOWTIDE_HOME", "TMPDIR")}
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**9)))  # the workers inherit it
    if _is_worker(config):
        run = Path(os.environ[RUN])
        worker: str = config.workerinput["workerid"]  # type: ignore[attr-defined]
    else:
        # Short, because sockets under it must stay below 108 bytes. Others may pass, so that tests
        # can put a place for an ordinary user under it; the homes themselves are private.
        run = Path(tempfile.mkdtemp(prefix="lowtide-suite-", dir="/tmp"))
        run.chmod(0o711)
        os.environ[RUN] = str(run)
        worker = "main"
    home = run / worker
    home.mkdir(mode=0o700)
    os.environ["LOWTIDE_HOME"] = str(home)
    temporary = run / "tmp"
    temporary.mkdir(mode=0o1777, exist_ok=True)
    temporary.chmod(0o1777)
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    for name in ("LOWTIDE_PROVIDER", "LOWTIDE_KEEP", "LOWTIDE_SIGNALS"):
        os.environ.pop(name, None)


def pytest_report_header() -> str:
    return f"random kills: {SEED}={os.environ[SEED]} draws the same again"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The suite's last test: nothing it made is left. Runs in the controller, when the workers are gone."""
    config = session.config
    if _is_worker(config) or config.option.collectonly:
        return
    _let_go_of_helpers()
    watch = Watch(Path(os.environ[RUN]))
    config.stash[_left] = watch.left(besides=_own_guardian(), patience_seconds=PATIENCE_SECONDS)
    if config.stash[_left] and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left = config.stash[_left]
    if left:
        terminalreporter.section("left behind by the suite", red=True)
        for leak in left:
            terminalreporter.write_line(str(leak))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config):
        _end_own_guardian()
        with contextlib.suppress(OSError):
            remove_tree(Path(os.environ[RUN]))  # some tests make trees deeper than the stack
    for name, value in config.stash[_outer].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None


def _let_go_of_helpers() -> None:
    """Without xdist the tests ran in this process, and its helper processes live as long as it does."""
    if "lowtide.providers.registry" not in sys.modules:
        return
    from lowtide.engine import engine
    from lowtide.providers import registry

    engine().run(registry.aclose(), timeout=30.0)


def _end_own_guardian() -> None:
    """It would make the ledger anew in a directory that is being removed. There is nothing left for it to do."""
    guardians = _own_guardian()
    if guardians and "lowtide.lifecycle.leases" in sys.modules:
        _let_go_of_guardian()
    for pid in guardians:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + 5
    while guardians & _own_guardian() and time.monotonic() < end:
        time.sleep(0.02)


def _let_go_of_guardian() -> None:
    """An owner whose guardian ends starts it again at once."""
    from lowtide.engine import engine
    from lowtide.lifecycle.leases import lifecycle

    async def let_go() -> None:
        link = lifecycle().guardian
        if link is not None:
            link._let_go()

    engine().run(let_go(), timeout=30.0)


def _own_guardian() -> set[int]:
    """The guardian of this very process, which watches it until its end. With xdist there is none."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if b"lowtide.lifecycle.guardian" in command and os.environb[b"LOWTIDE_HOME"] in command.split(
                    b"\0"
                ):
                    found.add(int(entry.name))
    return found


@pytest.fixture(scope="session")
def run_directory() -> Path:
    """The run's directory: what is put under it counts as the suite's own in the leak check."""
    return Path(os.environ[RUN])
