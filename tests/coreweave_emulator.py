"""The CoreWeave emulator for tests that need one: started with the first, ended with the module."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lowtide.emulators.handle import Handle

_NEEDED = ("cwsandbox", "grpc", "aiohttp")

needs_emulator = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in _NEEDED),
        reason="needs the extras lowtide[coreweave,emulators]",
    )
]


def serving(*, limit: int | None = None) -> Iterator[Handle]:
    """An emulator of its own, and this process's environment pointing at it meanwhile."""
    from lowtide.engine import engine
    from lowtide.providers import registry
    from lowtide.testing import emulator

    with emulator("coreweave", plain=True, limit=limit, set_environment=True) as handle:
        yield handle
        engine().run(registry.aclose(), timeout=60.0)
