"""The runtime on the local provider."""

from __future__ import annotations

from typing import ClassVar

from lowtide.runtime.base import Runtime


class LocalRuntime(Runtime):
    """Actions through the action server in a local sandbox."""

    provider: ClassVar[str] = "local"
