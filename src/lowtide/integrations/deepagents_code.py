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
from lowtide.integrations.other_user import become
from lowtide.providers import registry
from lowtide.providers.base import Capability
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
            try:
                backend.sandbox.start().result()
                if "working_dir" not in kwargs:
                    _make_working_dir(backend.sandbox)
            except BaseException:
                backend.sandbox.stop()  # nobody else has it
                raise
            return backend
        try:
            return LowtideBackend(Sandbox.from_id(sandbox_id).result())
        except errors.SandboxNotFoundError as error:
            raise SandboxNotFoundError(str(error)) from error

    def delete(self, *, sandbox_id: str, **kwargs: Any) -> None:
        """End it, whoever made it; silent when it is gone."""
        Sandbox.delete(sandbox_id, missing_ok=True).result()


def _make_working_dir(sandbox: Sandbox) -> None:
    """Where commands do not run as root (E2B, Daytona), root makes it, open to all: nobody else is in the sandbox."""
    try:
        sandbox.make_dir(WORKING_DIR).result()
    except errors.SandboxPermissionError:
        make = ["sh", "-c", 'mkdir -p -- "$1" && chmod 0777 -- "$1"', "sh", WORKING_DIR]
        has_users = Capability.USER in registry.provider_class(sandbox.provider).capabilities
        argv, user = (make, "root") if has_users else (become("root", make), None)
        sandbox.exec(argv, user=user, cwd="/", check=True).result()
