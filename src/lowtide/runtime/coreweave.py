"""The runtime on CoreWeave."""

from __future__ import annotations

from typing import ClassVar

from lowtide.runtime.base import Runtime


class CoreWeaveRuntime(Runtime):
    """Actions through the action server in a CoreWeave sandbox. At close it is deleted."""

    provider: ClassVar[str] = "coreweave"
