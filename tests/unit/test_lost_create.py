"""A create that did not answer, or answered with any error: what it made is found and ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    MissingDependencyError,
    SandboxGone,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.lifecycle.lease import LeaseState
from lowtide.lifecycle.leases import Lifecycle
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers.base import SandboxSpec
from lowtide.testing.faulty import FaultyProvider, FaultyService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FaultyService]:
    with FaultyService(tmp_path / "service") as service:
        yield service


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lifecycle:
    monkeypatch.setenv("LOWTIDE_SIGNALS", "off")
    return Lifecycle(ledger=SqliteLedger(tmp_path / "ledger.db"), path=tmp_path)


async def create(life: Lifecycle, service: FaultyService) -> None:
    provider = FaultyProvider(service.directory)
    lease = life.new_lease(provider)
    await life.create(provider, lease, SandboxSpec(labels=lease.labels))


async def until_settled(life: Lifecycle, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        (row,) = await life.ledger.leases(states=frozenset(LeaseState))
        if row.state is LeaseState.GONE:
            return
        assert time.monotonic() < deadline, f"still {row.state}: {row.reason}"
        await asyncio.sleep(0.02)


async def test_the_window_counts_from_the_end_of_the_request(life: Lifecycle, service: FaultyService) -> None:
    window = FaultyProvider.traits.create_window_seconds
    service.fault("create", hold_seconds=window + 0.5, commit_after_seconds=0.8)
    with pytest.raises(SandboxUnavailableError):
        await create(life, service)
    await until_settled(life)
    await asyncio.sleep(1.0)
    assert service.sandboxes() == []


def test_the_window_of_a_killed_owner_counts_from_its_death(service: FaultyService, tmp_path: Path) -> None:
    window = FaultyProvider.traits.create_window_seconds
    service.fault("create", hold_seconds=window + 1.5, commit_after_seconds=0.0)
    home = tmp_path / "home"
    owner = subprocess.Popen(
        [sys.executable, "-c", "from lowtide import Sandbox; Sandbox.run(provider='faulty')"],
        env={**os.environ, "LOWTIDE_HOME": str(home)},
    )
    while service.pending():
        assert owner.poll() is None
        time.sleep(0.02)
    time.sleep(window + 0.2)
    owner.kill()
    owner.wait()
    ledger = SqliteLedger(home / "ledger.db")
    deadline = time.monotonic() + 30
    while asyncio.run(ledger.leases()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ledger.close()
    time.sleep(1.5)  # when it has surely been committed
    assert service.sandboxes() == []


@pytest.mark.parametrize(
    ("raises", "error"),
    [
        ("authentication", AuthenticationError),
        ("validation", ValidationError),
        ("dependency", MissingDependencyError),
        ("cancelled", SandboxGone),
    ],
)
async def test_after_any_exception_once_the_request_went_out_lowtide_looks(
    life: Lifecycle, service: FaultyService, raises: str, error: type[Exception]
) -> None:
    service.fault("create", raises=raises)
    with pytest.raises(error):
        await create(life, service)
    await until_settled(life)
    assert service.sandboxes() == []
    assert life.held == {}


async def test_an_error_before_anything_was_sent_settles_at_once(
    life: Lifecycle, service: FaultyService
) -> None:
    service.fault("create", refuse=True)
    service.fault("find", fail=True)
    with pytest.raises(ValidationError) as caught:
        await create(life, service)
    assert caught.value.nothing_sent
    (row,) = await life.ledger.leases(states=frozenset(LeaseState))
    assert row.state is LeaseState.GONE
    assert service.pending() == ["find"]  # it did not even look


async def test_the_end_of_the_request_is_in_the_row(life: Lifecycle, service: FaultyService) -> None:
    service.fault("create", hold_seconds=0.5, commit_after_seconds=60.0)
    with pytest.raises(LowtideError):
        await create(life, service)
    deadline = time.monotonic() + 10
    row: Any = None
    while row is None or row.request_ended is None:
        assert time.monotonic() < deadline
        (row,) = await life.ledger.leases(states=frozenset(LeaseState))
        await asyncio.sleep(0.02)
    assert row.began is not None
    assert row.request_ended.seconds - row.began.seconds >= 0.5
    await until_settled(life)
    service.move_clock(86_400)
