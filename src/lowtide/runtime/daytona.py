"""The runtime on Daytona."""

from __future__ import annotations

from typing import ClassVar

from lowtide.runtime.base import Runtime


class DaytonaRuntime(Runtime):
    """Actions through the action server in a Daytona sandbox.

    At close, DAYTONA_KEEP_SANDBOX (any value) leaves it running, DAYTONA_DELETE_ON_CLOSE=false stops it and
    lets Daytona delete it later; otherwise it is deleted.
    """

    provider: ClassVar[str] = "daytona"
