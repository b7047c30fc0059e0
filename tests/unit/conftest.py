"""What modules of unit tests share: a local provider at the level of the seam; the program inside with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lowtide.providers.inside import build
from lowtide.providers.local import LocalProvider


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    """One with a home of its own, in which nothing is left after the test."""
    made = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    yield made
    async for info in made.list({}):
        await made.destroy(info.sandbox_id)
    await made.aclose()
    local = tmp_path / "home/local"
    assert [path for name in ("sandboxes", "rooms", "trash") for path in (local / name).glob("*")] == []


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same source with the address and undefined-behaviour sanitizers, which need a C library."""
    if shutil.which(build.COMPILERS["x86_64"]) is None or os.uname().machine != "x86_64":
        pytest.skip("no compiler for the sanitizers' build: scripts/engines up tools")
    target = tmp_path_factory.mktemp("inside") / "sanitized"
    try:
        build.build("x86_64", target, build.SANITIZED)
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no sanitizers: scripts/engines up tools")
    return target
