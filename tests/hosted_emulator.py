"""A hosted service's emulator for tests that need one: started with the first, ended with the module."""

from __future__ import annotations

import asyncio
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
        engine().run(_refused_creates_settled(provider), timeout=60.0)
        engine().run(registry.aclose(), timeout=60.0)


async def _refused_creates_settled(provider: str) -> None:
    """Nobody could look for them any more without the service."""
    from lowtide.lifecycle.leases import lifecycle

    waits = [held.ending for held in lifecycle().held.values() if held.provider.name == provider]
    if pending := [ending for ending in waits if ending is not None]:
        await asyncio.wait(pending, timeout=30.0)
