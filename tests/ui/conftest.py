"""A ledger with many sandboxes of the faulty provider, for the views."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from lowtide.engine import engine
from lowtide.lifecycle.lease import Lease, LeaseState, new_lease_id
from lowtide.lifecycle.leases import lifecycle
from lowtide.lifecycle.owner import Owner
from lowtide.testing.faulty import FaultyService


class Fill(Protocol):
    def __call__(self, count: int, name: str = "faulty") -> list[Lease]: ...


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FaultyService]:
    with FaultyService(tmp_path / "faulty") as made:
        yield made


@pytest.fixture
def fill(service: FaultyService) -> Iterator[Fill]:
    """Write this many live leases, and settle them after the test: nothing stands behind them."""
    written: list[Lease] = []

    def fill(count: int, name: str = "faulty") -> list[Lease]:
        ledger = lifecycle().ledger
        leases = [
            Lease(
                lease_id=new_lease_id(),
                provider="faulty",
                account="faulty",
                owner=Owner.current(),
                ledger_id=ledger.ledger_id,
                state=LeaseState.LIVE,
                sandbox_id=f"{name}-{number:04d}",
                tags=(f"job-{number % 10}", *([f"{name}-tag"] if name != "faulty" else [])),
            )
            for number in range(count)
        ]
        engine().run(ledger.restore(leases))
        written.extend(leases)
        return leases

    yield fill

    async def settle() -> None:
        for lease in written:
            await lifecycle().ledger.change(
                lease.lease_id,
                LeaseState.GONE,
                before=set(LeaseState) - {LeaseState.GONE},
                why="the test is over",
            )

    engine().run(settle())
