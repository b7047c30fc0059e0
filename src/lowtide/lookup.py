"""Finding sandboxes again: by tags, by id, whichever process made them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from lowtide import logger, validate
from lowtide.defaults import default_provider
from lowtide.errors import (
    AuthenticationError,
    MissingDependencyError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxTimeoutError,
    ValidationError,
)
from lowtide.held_sandbox import HeldSandbox
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.providers import registry
from lowtide.providers.base import LABEL_PREFIX, Labels, Provider, SandboxInfo, SandboxState

S = TypeVar("S")
StateName: TypeAlias = Literal[
    "pending", "running", "paused", "stopped", "terminating", "completed", "failed", "terminated"
]
Attach = Callable[[Provider, SandboxInfo, Lease | None], S]

log = logger.get("lowtide")

_OPEN = (LeaseState.LIVE, LeaseState.ENDING, LeaseState.KEPT, LeaseState.HANDED_OVER)


class Query(NamedTuple):
    tags: tuple[str, ...]
    provider: Provider | None
    state: SandboxState | None
    show_terminated: bool

    def wants(self, info: SandboxInfo) -> bool:
        if self.state is not None:
            return info.state is self.state
        return self.show_terminated or not info.state.terminal


def query(
    *,
    tags: Sequence[str] | None,
    provider: str | Provider | None,
    status: str | SandboxState | None,
    show_terminated: bool,
) -> Query:
    try:
        state = SandboxState(status) if status is not None else None
    except ValueError:
        known = ", ".join(repr(state.value) for state in SandboxState)
        raise ValidationError(f"status must be one of {known}, not {status!r}", argument="status") from None
    wanted = validate.tags("tags", () if tags is None else tags)
    return Query(wanted, chosen(provider), state, validate.flag("show_terminated", show_terminated))


def chosen(provider: str | Provider | None) -> Provider | None:
    """The provider that was asked for, connected; None when none was."""
    if provider is None:
        return None
    named = validate.provider("provider", provider)
    return registry.provider(named) if isinstance(named, str) else named


async def find_all(wanted: Query, attach: Attach[S]) -> list[S]:
    """The union of what the ledger and the providers know, oldest first."""
    from lowtide.lifecycle.leases import lifecycle

    gone = wanted.show_terminated or (wanted.state is not None and wanted.state.terminal)
    states = (*_OPEN, LeaseState.GONE) if gone else _OPEN
    only = wanted.provider.name if wanted.provider is not None else None
    leases = await lifecycle().leases(states=states, tags=wanted.tags, provider=only)
    places = [wanted.provider] if wanted.provider is not None else _places(leases)
    found = await asyncio.gather(*(_in_place(place, leases, wanted) for place in places))
    rows = [row for rows in found for row in rows]
    rows.sort(key=lambda row: row[2].created_at if row[2] is not None else 0.0)
    return [attach(*row) for row in rows]


async def find_one(sandbox_id: str, provider: Provider | None, attach: Attach[S]) -> S:
    provider = provider or await _provider_of(sandbox_id)
    from lowtide.lifecycle.leases import lifecycle

    lease = await lifecycle().lease_for(provider, sandbox_id)
    try:
        info = await provider.get(sandbox_id)
    except (SandboxNotFoundError, SandboxGone):
        if lease is None or lease.state is not LeaseState.GONE:
            raise
        info = _ended(lease)
    return attach(provider, info, lease)


async def delete(sandbox_id: str, provider: Provider | None, missing_ok: bool) -> None:
    from lowtide.lifecycle.leases import lifecycle

    provider = provider or await _provider_of(sandbox_id)
    if not await lifecycle().destroy(provider, sandbox_id) and not missing_ok:
        raise SandboxNotFoundError(
            f"no sandbox {sandbox_id} on provider {provider.name!r}; missing_ok=True makes that no error",
            provider=provider.name,
            sandbox_id=sandbox_id,
        )


async def until_complete(life: HeldSandbox, timeout: float | None, raise_on_termination: bool) -> None:
    """Ask, ever more slowly, until it has ended."""
    await life.accepted()
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    pause = 0.05
    while not (state := await life.refresh()).terminal:
        if deadline is not None and loop.time() >= deadline:
            raise SandboxTimeoutError(f"not complete after {timeout} seconds", **life.context)
        await asyncio.sleep(pause if deadline is None else min(pause, max(0.0, deadline - loop.time())))
        pause = min(1.0, pause * 1.5)
    if state is SandboxState.GONE and raise_on_termination:
        raise SandboxGone("it was ended before it completed", reason="terminated", **life.context)


async def _in_place(
    provider: Provider, leases: Sequence[Lease], wanted: Query
) -> list[tuple[Provider, SandboxInfo, Lease | None]]:
    mine = [row for row in leases if row.provider == provider.name and row.account == provider.account]
    rows = {lease.sandbox_id: lease for lease in mine if lease.sandbox_id is not None}
    seen: dict[str, SandboxInfo] = {}
    async for info in provider.list({f"{LABEL_PREFIX}tag-{tag}": "1" for tag in wanted.tags}):
        if Labels.from_dict(info.labels) is not None or info.sandbox_id in rows:
            seen[info.sandbox_id] = info
    unseen = [lease for sandbox_id, lease in rows.items() if sandbox_id not in seen]
    for info in await asyncio.gather(*(_look(provider, lease) for lease in unseen)):
        seen[info.sandbox_id] = info
    return [(provider, info, rows.get(info.sandbox_id)) for info in seen.values() if wanted.wants(info)]


async def _look(provider: Provider, lease: Lease) -> SandboxInfo:
    """A list may lag behind; asking by id is the truth."""
    if lease.state is LeaseState.GONE or lease.sandbox_id is None:
        return _ended(lease)
    try:
        return await provider.get(lease.sandbox_id)
    except (SandboxNotFoundError, SandboxGone):
        return _ended(lease)


def _ended(lease: Lease) -> SandboxInfo:
    return SandboxInfo(
        sandbox_id=lease.sandbox_id or lease.lease_id,
        state=SandboxState.GONE,
        labels=lease.labels.as_dict(),
        reason=lease.reason,
    )


def _places(leases: Sequence[Lease]) -> list[Provider]:
    """The default provider, and every other with an open lease that can be connected from here."""
    default = default_provider()
    places: list[Provider] = [registry.provider(default)]
    for name in sorted(
        {lease.provider for lease in leases if lease.state is not LeaseState.GONE} - {default}
    ):
        try:
            places.append(registry.provider(name))
        except (AuthenticationError, MissingDependencyError, ValidationError) as error:
            log.warning("sandboxes of provider %r are not listed: %s", name, error)
    return places


async def _provider_of(sandbox_id: str) -> Provider:
    from lowtide.lifecycle.leases import lifecycle

    lease = await lifecycle().ledger.find(None, None, sandbox_id)
    return registry.provider(lease.provider if lease is not None else default_provider())
