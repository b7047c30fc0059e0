"""The lifecycle with nothing under it: what the ledger and the guardian are measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowtide.lifecycle import leases
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.ledger import HistoryLine
from lowtide.lifecycle.owner import Owner


class Forgetful:
    """A ledger in this process's memory alone: what it holds is lost with it, and no guardian watches."""

    ledger_id = "none"

    def __init__(self) -> None:
        self._rows: dict[str, Lease] = {}

    async def intend(self, lease: Lease, *, durable: bool = True) -> None:
        self._rows[lease.lease_id] = lease

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
        lease = self._rows.get(lease_id)
        if lease is None or lease.state not in before:
            return None
        changed = replace(lease, state=after, reason=why or lease.reason, **fields)
        self._rows[lease_id] = changed
        return changed

    async def note(self, lease_id: str, why: str, **fields: Any) -> None:
        self._rows[lease_id] = replace(self._rows[lease_id], **fields)

    async def get(self, lease_id: str) -> Lease | None:
        return self._rows.get(lease_id)

    async def find(self, provider: str | None, account: str | None, sandbox_id: str) -> Lease | None:
        return next((row for row in self._rows.values() if row.sandbox_id == sandbox_id), None)

    async def named(self, text: str, **_: Any) -> list[Lease]:
        return []

    async def leases(self, **_: Any) -> list[Lease]:
        return []

    async def owners(self) -> list[Owner]:
        return []

    async def accounts(self) -> list[tuple[str, str]]:
        return []

    async def history(self, lease_id: str) -> list[HistoryLine]:
        return []

    async def restore(self, leases: Iterable[Lease]) -> None:
        pass

    async def forget(self, *, gone_before: float) -> int:
        return 0

    def close(self) -> None:
        pass


_without: leases.Lifecycle | None = None


@contextlib.contextmanager
def no_ledger(home: Path) -> Iterator[None]:
    """In here sandboxes are made and ended as always, with no row and no guardian."""
    global _without
    usual = leases.lifecycle()
    if _without is None:
        _without = leases.Lifecycle(ledger=Forgetful(), path=home)
    leases._lifecycle = _without
    try:
        yield
    finally:
        leases._lifecycle = usual
