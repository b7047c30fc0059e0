"""The runtime on Runloop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lowtide.runtime.base import Runtime

SIZE = "LARGE"
LEFT_SECONDS = 86_400
"""How long a devbox lives that a close leaves: Runloop sets that at create, and only starts it again later."""


class RunloopRuntime(Runtime):
    """Actions through the action server in a devbox of size LARGE, from Runloop's own image or a blueprint.

    ``rm_all_containers=False``, in the constructor or at close, leaves the devbox; otherwise it is shut down.
    What is to be left is best said in the constructor: said at close, it lives for one lease more.
    `provider_options` of the config: blueprint, size, launch commands and the rest of `RunloopOptions`.
    """

    provider: ClassVar[str] = "runloop"
    honours_rm_all_containers: ClassVar[bool] = True

    def _sandbox_options(self) -> dict[str, Any]:
        from lowtide.providers.runloop.options import RunloopOptions

        options = super()._sandbox_options()
        given = options.get("provider_options") or {}
        if isinstance(given, Mapping):
            given = RunloopOptions(**given)
        if isinstance(given, RunloopOptions):
            if given.size is None:
                given = replace(given, size=SIZE)
            if not self.rm_all_containers and given.keep_alive_seconds is None:
                given = replace(given, keep_alive_seconds=LEFT_SECONDS)
        return {**options, "provider_options": given}
