"""Runloop: hosted devboxes, through Runloop's own async SDK (extra ``lowtide[runloop]``)."""

from __future__ import annotations

from lowtide.providers.runloop.options import RunloopOptions
from lowtide.providers.runloop.provider import RunloopProvider

__all__ = ["RunloopOptions", "RunloopProvider"]
