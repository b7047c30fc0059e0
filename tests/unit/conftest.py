"""What modules of unit tests share: a local provider at the level of the seam."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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
