"""Daytona: hosted sandboxes, through Daytona's own async SDK (extra ``lowtide[daytona]``)."""

from __future__ import annotations

from lowtide.providers.daytona.options import DaytonaOptions
from lowtide.providers.daytona.provider import DaytonaProvider

__all__ = ["DaytonaOptions", "DaytonaProvider"]
