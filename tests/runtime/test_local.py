"""The agent's view on the local provider: shell and files through the action server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.runtime import LocalRuntime
from tests.runtime import cases
from tests.runtime.cases import shell  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def runtime() -> Iterator[LocalRuntime]:
    with LocalRuntime() as made:
        yield made


class TestShell(cases.ShellCases):
    pass


class TestFiles(cases.FileCases):
    pass
