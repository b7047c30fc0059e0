"""What the suites of the frameworks share, as a plugin: where sandboxes are made, and a state directory of their own.

Not a conftest.py, which the run of all tests would load. They run in a framework's own virtual environment (`scripts/framework_suites`), not with the rest of the tests.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROVIDER = os.environ.get("LOWTIDE_SUITE_PROVIDER", "local")


_made: list[Path] = []


def pytest_configure() -> None:
    given = os.environ.get("LOWTIDE_HOME")
    if given is None:  # on its own: short, because sockets under it must stay below 108 bytes
        _made.append(Path(tempfile.mkdtemp(prefix="lowtide-suite-", dir="/tmp")))
    home = Path(given or _made[0]) / f"fw-{os.getpid()}"
    home.mkdir(mode=0o700, parents=True)
    os.environ["LOWTIDE_HOME"] = str(home)
    os.environ["LOWTIDE_PROVIDER"] = PROVIDER


def pytest_unconfigure() -> None:
    for place in _made:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test no lease is open, unless a fixture of a wider scope holds it."""
    yield
    from tests.integrations.suites.kills import open_leases

    assert [sandbox for sandbox, tags in open_leases() if "shared" not in tags] == []
