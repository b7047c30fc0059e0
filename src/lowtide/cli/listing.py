"""The rows of `lowtide ls`: the ledger's leases and, where it is cheap or asked for, what the provider says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.cli.text import timestamp
from lowtide.engine import engine
from lowtide.lifecycle.lease import Lease, LeaseState, Owner, this_host
from lowtide.lifecycle.protocol import lifecycle
from lowtide.providers import registry
from lowtide.providers.base import Labels, Provider, SandboxInfo

_STATE_NAMES = {
    LeaseState.INTENDED: "pending",
    LeaseState.LIVE: "running",
    LeaseState.ENDING: "terminating",
    LeaseState.KEPT: "kept",
    LeaseState.HANDED_OVER: "released",
    LeaseState.GONE: "terminated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sandbox, as `ls` shows it. Times are Unix seconds."""

    id: str
    provider: str
    state: str
    tags: tuple[str, ...]
    owner: Owner | None
    created_at: float | None
    expires_at: float | None
    kept_until: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "provider": self.provider,
            "state": self.state,
            "tags": list(self.tags),
            "owner": {"host": self.owner.host, "pid": self.owner.pid, "alive": self.owner.alive()}
            if self.owner
            else None,
            "created_at": timestamp(self.created_at),
            "expires_at": timestamp(self.expires_at),
            "kept_until": timestamp(self.kept_until),
        }

    @property
    def ends_at(self) -> float | None:
        return self.kept_until if self.kept_until is not None else self.expires_at

    @property
    def owner_text(self) -> str:
        if self.owner is None:
            return "elsewhere"
        alive = {True: "", False: " (dead)", None: " (?)"}[self.owner.alive()]
        place = "" if self.owner.host == this_host() else f"@{self.owner.host.partition('.')[0]}"
        return f"{self.owner.pid}{place}{alive}"


def rows(*, provider: str | None, tags: tuple[str, ...], everything: bool) -> list[Row]:
    """Sorted by age, oldest first."""
    return engine().run(_rows(provider, tags, everything))


async def _rows(name: str | None, tags: tuple[str, ...], everything: bool) -> list[Row]:
    states = list(LeaseState) if everything else None
    leases = await lifecycle().leases(states=states, tags=tags, provider=name)
    place = registry.provider(name) if name is not None else None
    seen = {info.sandbox_id: info for info in await _listed(place, tags)} if place is not None else {}
    shown = [_from_lease(lease, seen.pop(lease.sandbox_id or "", None)) for lease in leases]
    if place is not None:
        shown += [_from_info(place.name, info) for info in seen.values()]
    return sorted(shown, key=lambda row: (row.created_at or 0.0, row.id))


async def _listed(place: Provider, tags: tuple[str, ...]) -> list[SandboxInfo]:
    """Everything at the provider that carries our full label set and these tags."""
    found = []
    async for info in place.list({}):
        labels = Labels.from_dict(info.labels)
        if labels is not None and set(tags) <= set(labels.tags):
            found.append(info)
    return found


def _from_lease(lease: Lease, info: SandboxInfo | None) -> Row:
    state = _STATE_NAMES[lease.state]
    if lease.state is LeaseState.LIVE and info is not None:
        state = str(info.state)
    expires_at = lease.expires_at
    if info is not None and info.expires_at is not None:
        expires_at = info.expires_at.timestamp()
    return Row(
        id=lease.sandbox_id or lease.lease_id,
        provider=lease.provider,
        state=state,
        tags=lease.tags,
        owner=lease.owner,
        created_at=lease.created_at,
        expires_at=expires_at,
        kept_until=lease.kept_until,
    )


def _from_info(provider: str, info: SandboxInfo) -> Row:
    labels = Labels.from_dict(info.labels)
    return Row(
        id=info.sandbox_id,
        provider=provider,
        state=str(info.state),
        tags=labels.tags if labels else (),
        owner=None,
        created_at=info.created_at.timestamp() if info.created_at else None,
        expires_at=info.expires_at.timestamp() if info.expires_at else None,
        kept_until=None,
    )
