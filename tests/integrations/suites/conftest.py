"""What the suites of the frameworks share: where sandboxes are made, and a state directory of their own.

They run in a framework's own virtual environment (`scripts/framework_suites`), not with the rest of the tests.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROVIDER = os.environ.get("LOWTIDE_SUITE_PROVIDER", "local")


def pytest_configure() -> None:
    home = Path(os.environ.get("LOWTIDE_HOME") or tempfile.mkdtemp(prefix="lowtide-suite-", dir="/tmp"))
    home = home / f"fw-{os.getpid()}"
    home.mkdir(mode=0o700, parents=True)
    os.environ["LOWTIDE_HOME"] = str(home)
    os.environ["LOWTIDE_PROVIDER"] = PROVIDER


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test `lowtide ls` shows nothing, unless a fixture of a wider scope holds it."""
    yield
    if "shared" not in request.node.keywords:
        from tests.integrations.suites.kills import shown

        assert [row for row in shown() if row["tags"] != ["shared"]] == []
