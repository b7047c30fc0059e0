"""The ledger: the durable record of leases, and what the lifecycle needs of it.

Every change of state is a compare-and-set, written together with a line of history in one
transaction. A row is never deleted before its sandbox is confirmed gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.owner import Owner

OPEN_STATES = frozenset(LeaseState) - {LeaseState.GONE, LeaseState.HANDED_OVER}
"""The states in which somebody here still has to end something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One change in the life of a lease."""

    at: float
    before: LeaseState | None
    after: LeaseState
    pid: int
    why: str


class Ledger(Protocol):
    """What the lifecycle needs from a ledger. A PostgreSQL one for a fleet fits here."""

    @property
    def ledger_id(self) -> str:
        """Marks every sandbox made under this ledger."""
        ...

    async def intend(self, lease: Lease, *, durable: bool = True) -> None:
        """Write a new row. On return it survives a crash of this process and, if `durable`, a power cut."""
        ...

    async def change(
        self,
        lease_id: str,
        after: LeaseState,
        *,
        before: Collection[LeaseState],
        owned_by: Owner | None = None,
        why: str = "",
        **fields: Any,
    ) -> Lease | None:
        """Compare and set: the changed row, or None when its state or owner was another."""
        ...

    async def note(self, lease_id: str, why: str, **fields: Any) -> None:
        """Change fields without changing the state."""
        ...

    async def get(self, lease_id: str) -> Lease | None: ...

    async def find(self, provider: str | None, account: str | None, sandbox_id: str) -> Lease | None:
        """The newest row of that sandbox; None stands for any provider, any account."""
        ...

    async def named(self, text: str, *, ended: bool, provider: str | None = None) -> list[Lease]:
        """The rows with that sandbox or lease id, oldest first; if there are none, a few of those whose id begins or
        ends so. Either of the open ones or of the `ended`, of which only the newest are searched for an ending."""
        ...

    async def leases(
        self,
        *,
        states: Collection[LeaseState] | None = None,
        owner: Owner | None = None,
        provider: str | None = None,
        tags: Collection[str] = (),
        newest: int | None = None,
    ) -> list[Lease]:
        """Oldest first. With `newest`, at most so many, and those the youngest."""
        ...

    async def owners(self) -> list[Owner]:
        """Who still owns something that has to be ended, on whichever machine."""
        ...

    async def accounts(self) -> list[tuple[str, str]]:
        """Every provider and account that a row is for, settled ones too."""
        ...

    async def history(self, lease_id: str) -> list[HistoryLine]: ...

    async def restore(self, leases: Iterable[Lease]) -> None:
        """Write these rows again where they are missing: the file was removed or replaced."""
        ...

    async def forget(self, *, gone_before: float) -> int:
        """Drop rows that were gone before that time. Returns how many."""
        ...

    def close(self) -> None: ...
