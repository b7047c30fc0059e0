"""A hosted service's emulator for tests that need one: started with the first, ended with the module."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lowtide.emulators.handle import Handle


def needed(provider: str, *packages: str) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.skipif(
            any(importlib.util.find_spec(name) is None for name in packages),
            reason=f"needs the extras lowtide[{provider},emulators]",
        )
    ]


def serving(provider: str, *, plain: bool = True, limit: int | None = None) -> Iterator[Handle]:
    """An emulator of its own, and this process's environment pointing at it meanwhile."""
    from lowtide.engine import engine
    from lowtide.providers import registry
    from lowtide.testing import emulator

    with emulator(provider, plain=plain, limit=limit, set_environment=True) as handle:
        yield handle
        engine().run(registry.aclose(), timeout=60.0)
