"""The local provider: sandboxes on this Linux machine, through bubblewrap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.providers.local.provider import LocalProvider

__all__ = ["LocalProvider"]


def __getattr__(name: str) -> Any:
    if name == "LocalProvider":
        from lowtide.providers.local.provider import LocalProvider

        return LocalProvider
    raise AttributeError(name)
