"""The runtime on E2B: actions run directly through its SDK, without an action server."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lowtide.runtime.base import Runtime

if TYPE_CHECKING:
    from lowtide.runtime.backend import Backend
    from lowtide.sandbox import Sandbox


class E2BRuntime(Runtime):
    """A shell on E2B's terminals, files and code through its own services.

    With `attach_to_existing` a close leaves the sandbox: this session did not create it.
    """

    provider: ClassVar[str] = "e2b"

    def _new_backend(self, sandbox: Sandbox) -> Backend:
        from lowtide.runtime.direct import Direct

        return Direct(sandbox, working_dir=self.config.working_dir)
