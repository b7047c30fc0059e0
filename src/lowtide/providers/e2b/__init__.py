"""E2B: hosted microVMs, through E2B's own async SDK (extra ``lowtide[e2b]``)."""

from __future__ import annotations

from lowtide.providers.e2b.options import E2BOptions
from lowtide.providers.e2b.provider import E2BProvider

__all__ = ["E2BOptions", "E2BProvider"]
