"""deepagents-code (``dcode --sandbox lowtide``): found by its entry point. Needs the extra ``lowtide[deepagents]``."""

from __future__ import annotations

from typing import Any

from deepagents_code.integrations.sandbox_provider import (
    SandboxNotFoundError,
    SandboxProvider,
    SandboxProviderMetadata,
)

from lowtide import errors
from lowtide.integrations.deepagents import LowtideBackend
from lowtide.sandbox import Sandbox

WORKING_DIR = "/workspace"


class LowtideProvider(SandboxProvider):
    """Sandboxes of LOWTIDE_PROVIDER, LOWTIDE_IMAGE and ``config.toml``; `params` in dcode's own configuration go on top."""

    @property
    def metadata(self) -> SandboxProviderMetadata:
        """What dcode asks before it makes one."""
        return SandboxProviderMetadata(name="lowtide", working_dir=WORKING_DIR)

    def get_or_create(self, *, sandbox_id: str | None = None, **kwargs: Any) -> LowtideBackend:
        """A new one, which ends with this process (dcode's server is killed by SIGTERM, and that is enough); or one that exists."""
        if sandbox_id is None:
            backend = LowtideBackend(**{"working_dir": WORKING_DIR, **kwargs})
            backend.sandbox.start().result()
            return backend
        try:
            return LowtideBackend(Sandbox.from_id(sandbox_id).result())
        except errors.SandboxNotFoundError as error:
            raise SandboxNotFoundError(str(error)) from error

    def delete(self, *, sandbox_id: str, **kwargs: Any) -> None:
        """End it, whoever made it; silent when it is gone."""
        Sandbox.delete(sandbox_id, missing_ok=True).result()
