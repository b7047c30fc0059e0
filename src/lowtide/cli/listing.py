"""The rows of `lowtide ls`: the ledger's leases and, where it is cheap or asked for, what the provider says."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lowtide.cli.text import timestamp
from lowtide.errors import LedgerError
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.ledger import Ledger
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.machine import home, machine_id

if TYPE_CHECKING:
    from lowtide.providers.base import Provider, SandboxInfo

T = TypeVar("T")

_STATE_NAMES = {
    LeaseState.INTENDED: "pending",
    LeaseState.LIVE: "running",
    LeaseState.ENDING: "terminating",
    LeaseState.KEPT: "kept",
    LeaseState.HANDED_OVER: "released",
    LeaseState.GONE: "terminated",
}
_ENDED = (LeaseState.HANDED_OVER, LeaseState.GONE)


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
        if self.kept_until is not None:
            return "-"
        alive = {True: "", False: " (dead)", None: " (?)"}[self.owner.alive()]
        place = "" if self.owner.machine_id == machine_id() else f"@{self.owner.host.partition('.')[0]}"
        return f"{self.owner.pid}{place}{alive}"


def rows(*, provider: str | None, tags: tuple[str, ...], ended: int = 0) -> list[Row]:
    """Sorted by age, oldest first: all that are open, and the newest `ended`, which are gone or were released."""
    if provider is None:
        ledger = SqliteLedger(home() / "ledger.db")
        try:
            shown = [_from_lease(lease, None) for lease in _now(leases(ledger, None, tags, ended))]
        finally:
            ledger.close()
    else:
        from lowtide.engine import engine

        shown = engine().run(_with_provider(provider, tags, ended))
    return sorted(shown, key=lambda row: (row.created_at or 0.0, row.id))


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for. Only a busy ledger needs the event loop.

    Importing and starting one would cost `lowtide ls` half of the time it has.
    """
    try:
        work.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    work.close()
    raise LedgerError("the ledger is busy; try again", retryable=True)


async def leases(ledger: Ledger, provider: str | None, tags: tuple[str, ...], ended: int) -> list[Lease]:
    """All that are open, and the newest `ended`."""
    found = await ledger.leases(tags=tags, provider=provider)
    if ended:
        found += await ledger.leases(states=_ENDED, tags=tags, provider=provider, newest=ended)
    return found


async def _with_provider(name: str, tags: tuple[str, ...], ended: int) -> list[Row]:
    """The ledger's rows of that provider with what it says about them, and what it has besides."""
    from lowtide.lifecycle.leases import lifecycle
    from lowtide.providers import registry

    known = await leases(lifecycle().ledger, name, tags, ended)
    place = registry.provider(name)
    seen = {info.sandbox_id: info for info in await _listed(place, tags)}
    shown = [_from_lease(lease, seen.pop(lease.sandbox_id or "", None)) for lease in known]
    return shown + [_from_info(place.name, info) for info in seen.values()]


async def _listed(place: Provider, tags: tuple[str, ...]) -> list[SandboxInfo]:
    """Everything at the provider that carries our full label set and these tags."""
    from lowtide.providers.base import Labels

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
    from lowtide.providers.base import Labels

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
