"""The fleet: every sandbox that the ledger and the providers know, as rows for people.

`rows` reads once, for `lowtide ls`, and starts no event loop unless a provider has to be asked. `Fleet` is read again
and again, for the live views: it asks each provider in the background, so that one slow provider delays no row.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lowtide.errors import LedgerError, LowtideError
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.ledger import Ledger
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.machine import home, machine_id

if TYPE_CHECKING:
    import asyncio

    from lowtide.providers.base import Provider, SandboxInfo

T = TypeVar("T")

STATE_NAMES = {
    LeaseState.INTENDED: "pending",
    LeaseState.LIVE: "running",
    LeaseState.ENDING: "terminating",
    LeaseState.KEPT: "kept",
    LeaseState.HANDED_OVER: "released",
    LeaseState.GONE: "terminated",
}
"""What a lease's state is called where people see it. The provider's own state replaces "running"."""

ENDED = (LeaseState.HANDED_OVER, LeaseState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sandbox. Times are Unix seconds."""

    id: str
    provider: str
    state: str
    tags: tuple[str, ...]
    owner: Owner | None
    created_at: float | None
    expires_at: float | None
    kept_until: float | None
    owner_alive: bool | None = None
    """Whether the owner's process lived when the row was read; None where that cannot be seen from here."""
    lease_id: str | None = None
    session: str | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON; times in ISO 8601."""
        owner = self.owner
        return {
            "id": self.id,
            "provider": self.provider,
            "state": self.state,
            "tags": list(self.tags),
            "owner": {"host": owner.host, "pid": owner.pid, "alive": self.owner_alive} if owner else None,
            "created_at": _iso(self.created_at),
            "expires_at": _iso(self.expires_at),
            "kept_until": _iso(self.kept_until),
        }

    @property
    def ends_at(self) -> float | None:
        """When the sandbox is destroyed at the latest, where a time is known."""
        return self.kept_until if self.kept_until is not None else self.expires_at

    @property
    def open(self) -> bool:
        """Whether the sandbox may still exist and cost something."""
        return self.state not in ("terminated", "completed", "failed", "released")

    @property
    def owner_state(self) -> str:
        """`alive`, `dead`, `unknown`, `elsewhere` (no lease in this ledger) or `none` (kept: nobody's to end)."""
        if self.owner is None:
            return "elsewhere"
        if self.kept_until is not None:
            return "none"
        return {True: "alive", False: "dead", None: "unknown"}[self.owner_alive]

    @property
    def owner_text(self) -> str:
        """The owner for a table: its process, its machine where that is another one, and whether it is dead."""
        if self.owner is None:
            return "elsewhere"
        state = self.owner_state
        if state == "none":
            return "-"
        mark = {"alive": "", "dead": " (dead)", "unknown": " (?)"}[state]
        place = "" if self.owner.machine_id == machine_id() else f"@{self.owner.host.partition('.')[0]}"
        return f"{self.owner.pid}{place}{mark}"


def rows(*, provider: str | None, tags: tuple[str, ...], ended: int = 0) -> list[Row]:
    """Sorted by age, oldest first: all that are open, and the newest `ended` of the others."""
    if provider is None:
        ledger = SqliteLedger(home() / "ledger.db")
        try:
            shown = _from_leases(_now(leases(ledger, None, tags, ended)), {})
        finally:
            ledger.close()
    else:
        from lowtide.engine import engine

        shown = engine().run(_with_provider(provider, tags, ended))
    return _sorted(shown)


async def leases(ledger: Ledger, provider: str | None, tags: tuple[str, ...], ended: int) -> list[Lease]:
    """All open leases, and the newest `ended` of the others."""
    found = await ledger.leases(tags=tags, provider=provider)
    if ended:
        found += await ledger.leases(states=ENDED, tags=tags, provider=provider, newest=ended)
    return found


@dataclass(slots=True)
class Fleet:
    """The rows of every configured provider, kept current. All methods run on lowtide's event loop.

    `provider` narrows the view to one. Without it, the view has the default provider, every provider with a lease in the
    ledger, and every hosted provider whose credentials are set. `problems` says which provider could not be asked.
    """

    provider: str | None = None
    tags: tuple[str, ...] = ()
    ended: int = 200
    deadline_seconds: float = 20.0
    problems: dict[str, str] = field(default_factory=dict)
    _seen: dict[str, list[SandboxInfo]] = field(default_factory=dict)
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def rows(self) -> list[Row]:
        """What the ledger has now, joined with each provider's last answer. Never waits for a provider."""
        from lowtide.lifecycle.leases import lifecycle

        found = await leases(lifecycle().ledger, self.provider, self.tags, self.ended)
        seen = {(name, info.sandbox_id): info for name, infos in self._seen.items() for info in infos}
        shown = _from_leases(found, seen)
        known = {(row.provider, row.id) for row in shown}
        # A sandbox can have ended since its provider was asked, with a lease older than the newest `ended`.
        shown += [_from_info(name, info) for (name, id), info in seen.items() if (name, id) not in known]
        return _sorted(shown)

    async def refresh(self) -> None:
        """Ask every provider that is not being asked already, and wait for the answers, bounded by the deadline."""
        import asyncio

        for name in await self._names():
            running = self._asking.get(name)
            if running is None or running.done():
                self._asking[name] = asyncio.ensure_future(self._ask(name))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=self.deadline_seconds)

    async def aclose(self) -> None:
        """Stop asking."""
        import asyncio

        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _names(self) -> list[str]:
        from lowtide.defaults import default_provider
        from lowtide.lifecycle.leases import lifecycle

        if self.provider is not None:
            return [self.provider]
        open_leases = await lifecycle().ledger.leases()
        return list(
            dict.fromkeys(
                [default_provider(), *(lease.provider for lease in open_leases), *configured_providers()]
            )
        )

    async def _ask(self, name: str) -> None:
        import asyncio

        from lowtide.providers import registry

        try:
            async with asyncio.timeout(self.deadline_seconds):
                self._seen[name] = await _listed(registry.provider(name), self.tags)
        except TimeoutError:
            self.problems[name] = f"no answer within {self.deadline_seconds:g} s"
        except LowtideError as error:
            self.problems[name] = str(error)
        else:
            self.problems.pop(name, None)


def configured_providers() -> list[str]:
    """The hosted providers that are installed and whose credentials are set in the environment. Imports no SDK."""
    import os

    from lowtide.providers import registry

    return [
        name
        for name, entry in registry.known().items()
        if entry.environment
        and name not in ("docker", "kubernetes")
        and entry.installed
        and any(key.startswith(entry.environment) and "KEY" in key for key in os.environ)
    ]


def _sorted(shown: Iterable[Row]) -> list[Row]:
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


async def _with_provider(name: str, tags: tuple[str, ...], ended: int) -> list[Row]:
    """The ledger's rows of that provider with what it reports about them, and what it has besides."""
    from lowtide.lifecycle.leases import lifecycle
    from lowtide.providers import registry

    known = await leases(lifecycle().ledger, name, tags, ended)
    place = registry.provider(name)
    seen = {(name, info.sandbox_id): info for info in await _listed(place, tags)}
    shown = _from_leases(known, seen)
    found = {row.id for row in shown}
    return shown + [_from_info(name, info) for info in seen.values() if info.sandbox_id not in found]


async def _listed(place: Provider, tags: Sequence[str]) -> list[SandboxInfo]:
    """Everything at the provider that carries our full label set and these tags."""
    from lowtide.providers.base import Labels

    found = []
    async for info in place.list({}):
        labels = Labels.from_dict(info.labels)
        if labels is not None and set(tags) <= set(labels.tags):
            found.append(info)
    return found


def _from_leases(found: Iterable[Lease], seen: Mapping[tuple[str, str], SandboxInfo]) -> list[Row]:
    alive: dict[Owner, bool | None] = {}  # one look at each owner, however many sandboxes it has
    shown = []
    for lease in found:
        if lease.owner not in alive:
            alive[lease.owner] = lease.owner.alive()
        info = seen.get((lease.provider, lease.sandbox_id or ""))
        shown.append(_from_lease(lease, info, alive[lease.owner]))
    return shown


def _from_lease(lease: Lease, info: SandboxInfo | None, owner_alive: bool | None) -> Row:
    state = STATE_NAMES[lease.state]
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
        owner_alive=owner_alive,
        created_at=lease.created_at,
        expires_at=expires_at,
        kept_until=lease.kept_until,
        lease_id=lease.lease_id,
        session=lease.session,
        reason=lease.reason,
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
        session=labels.session if labels else None,
    )


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    from datetime import UTC, datetime

    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
