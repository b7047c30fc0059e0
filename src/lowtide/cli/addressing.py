"""From what a person types to the sandbox that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lowtide.engine import engine
from lowtide.errors import SandboxNotFoundError

if TYPE_CHECKING:
    from lowtide.lifecycle.lease import Lease
    from lowtide.providers.base import Provider
    from lowtide.sandbox import Sandbox

_SHORTEST = 4


async def lease_named(text: str, provider: str | None = None, *, ended_too: bool = False) -> Lease | None:
    """The lease with that sandbox id or lease id, or the only one whose id starts or ends so."""
    from lowtide.lifecycle.leases import lifecycle

    for ended in (False, True) if ended_too else (False,):
        found = _only(text, await lifecycle().ledger.named(text, ended=ended, provider=provider))
        if found is not None:
            return found
    return None


def _only(text: str, leases: list[Lease]) -> Lease | None:
    exact = [lease for lease in leases if text in (lease.sandbox_id, lease.lease_id)]
    if exact:
        return exact[-1]
    if len(text) < _SHORTEST:
        return None
    # Ids begin with the time they were made, so that the end of one is what tells it from its siblings.
    if len(leases) > 1:
        names = ", ".join(str(lease.sandbox_id or lease.lease_id) for lease in leases[:3])
        raise click.UsageError(
            f"{text} could be several sandboxes ({names} …): say more of the id; `lowtide ls` lists them"
        )
    return leases[0] if leases else None


def find_sandbox(text: str, provider: str | None = None) -> Sandbox:
    """The sandbox, also one that another process or machine made. SandboxNotFoundError."""
    from lowtide.sandbox import Sandbox

    lease = engine().run(lease_named(text, provider))
    if lease is None:
        return Sandbox.from_id(text, provider=provider).result()
    if lease.sandbox_id is None:
        raise SandboxNotFoundError(
            f"{text} is still being created; try again in a moment", provider=lease.provider
        )
    return Sandbox.from_id(lease.sandbox_id, provider=lease.provider).result()


def connected(sandbox: Sandbox) -> tuple[Provider, str]:
    """The provider behind a started sandbox, ready for commands, and the id there."""
    from lowtide.providers import registry

    sandbox.wait()
    return registry.provider(sandbox.provider), str(sandbox.sandbox_id)
