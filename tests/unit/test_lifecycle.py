"""The protocol on bad days: lost answers, cancellations, failing deletes, races. Nothing is left, nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import (
    RateLimitError,
    SandboxFailedError,
    SandboxGone,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.lifecycle.claim import Claim
from lowtide.lifecycle.lease import Keep, Lease, LeaseState, Outcome
from lowtide.lifecycle.leases import Lifecycle
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.lifecycle.sweep import Action, sweep
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.testing.faulty import FaultyProvider, FaultyService

pytestmark = pytest.mark.usefixtures("no_signals")


@pytest.fixture
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_SIGNALS", "off")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FaultyService]:
    with FaultyService(tmp_path / "service") as service:
        yield service


@pytest.fixture
def provider(service: FaultyService) -> FaultyProvider:
    return FaultyProvider(service.directory)


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    return Lifecycle(ledger=SqliteLedger(tmp_path / "ledger.db"), path=tmp_path)


async def make(life: Lifecycle, provider: FaultyProvider, **lease: Any) -> Lease:
    made = life.new_lease(provider, **lease)
    await life.create(provider, made, SandboxSpec(labels=made.labels))
    return made


async def settled(life: Lifecycle, lease_id: str, seconds: float = 10.0) -> Lease:
    deadline = time.monotonic() + seconds
    while True:
        lease = await life.ledger.get(lease_id)
        assert lease is not None, "a row was lost"
        if lease.state is LeaseState.GONE:
            return lease
        assert time.monotonic() < deadline, f"still {lease.state}: {lease.reason}"
        await asyncio.sleep(0.02)


async def only_lease(life: Lifecycle) -> Lease:
    (lease,) = await life.ledger.leases(states=frozenset(LeaseState))
    return lease


async def test_the_row_is_on_disk_before_the_provider_is_asked(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.fault("create", hold_seconds=0.3)
    making = asyncio.ensure_future(make(life, provider))
    await asyncio.sleep(0.15)
    reader = SqliteLedger(life.path / "ledger.db")
    assert [lease.state for lease in await reader.leases()] == [LeaseState.INTENDED]
    lease = await making
    row = await life.ledger.get(lease.lease_id)
    assert row is not None
    assert (row.state, row.sandbox_id) == (LeaseState.LIVE, lease.lease_id)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"lose_answer": True}, SandboxUnavailableError),
        ({"commit_after_seconds": 0.8}, SandboxUnavailableError),
        ({"fail": True}, SandboxFailedError),
        ({"rate_limit": 1}, RateLimitError),
    ],
)
async def test_after_any_fault_of_create_nothing_is_left(
    life: Lifecycle,
    provider: FaultyProvider,
    service: FaultyService,
    fault: dict[str, Any],
    error: type[Exception],
) -> None:
    service.fault("create", **fault)
    with pytest.raises(error):
        await make(life, provider)
    lease = await only_lease(life)
    await settled(life, lease.lease_id)
    await asyncio.sleep(1.0 if "commit_after_seconds" in fault else 0)
    assert service.sandboxes() == []
    assert life.held == {}


async def test_a_refused_create_settles_at_once(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.fault("create", refuse=True)
    with pytest.raises(ValidationError):
        await make(life, provider)
    assert (await only_lease(life)).state is LeaseState.GONE


async def test_an_empty_look_up_is_no_proof_while_the_window_is_open(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.fault("create", lose_answer=True)
    service.fault("find", blind=True, times=4)
    with pytest.raises(SandboxUnavailableError):
        await make(life, provider)
    await settled(life, (await only_lease(life)).lease_id)
    assert service.sandboxes() == []


async def test_cancelling_a_create_in_flight_destroys_what_it_makes(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.fault("create", hold_seconds=0.4)
    making = asyncio.ensure_future(make(life, provider))
    await asyncio.sleep(0.2)
    assert len(service.sandboxes()) == 1
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await settled(life, (await only_lease(life)).lease_id)
    assert service.sandboxes() == []


async def test_a_timeout_around_create_leaves_nothing(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.fault("create", hold_seconds=30)
    lease = life.new_lease(provider)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await life.create(provider, lease, SandboxSpec(labels=lease.labels))
    report = await life.end(provider, lease.lease_id, deadline_seconds=2.0)
    assert report.outcome in (Outcome.DESTROYED, Outcome.ALREADY_GONE)
    assert service.sandboxes() == []


async def test_ending_while_the_create_is_in_flight_ends_that_too(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.fault("create", hold_seconds=0.5)
    lease = life.new_lease(provider)
    making = asyncio.ensure_future(life.create(provider, lease, SandboxSpec(labels=lease.labels)))
    await asyncio.sleep(0.2)
    report = await life.end(provider, lease.lease_id)
    with pytest.raises(SandboxGone):
        await making
    assert report.outcome in (Outcome.DESTROYED, Outcome.ALREADY_GONE)
    assert service.sandboxes() == []
    assert (await settled(life, lease.lease_id)).state is LeaseState.GONE


async def test_ending_twice_and_at_once_is_one_ending(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider)
    service.fault("destroy", hold_seconds=0.2)
    first, second = await asyncio.gather(
        life.end(provider, lease.lease_id), life.end(provider, lease.lease_id)
    )
    assert first is second
    assert first.outcome is Outcome.DESTROYED
    again = await life.end(provider, lease.lease_id)
    assert again.outcome is Outcome.ALREADY_GONE


async def test_cancelling_one_caller_of_end_does_not_stop_the_ending(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider)
    service.fault("destroy", hold_seconds=0.3)
    ending = asyncio.ensure_future(life.end(provider, lease.lease_id))
    await asyncio.sleep(0.1)
    ending.cancel()
    await settled(life, lease.lease_id)
    assert service.sandboxes() == []


async def test_a_delete_that_fails_is_tried_again(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider)
    service.fault("destroy", fail=True, times=2)
    service.fault("destroy", rate_limit=0.1)
    report = await life.end(provider, lease.lease_id)
    assert report.outcome is Outcome.DESTROYED
    assert service.sandboxes() == []


async def test_a_delete_that_hangs_is_bounded_stays_in_the_ledger_and_can_be_tried_again(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider)
    service.fault("destroy", hold_seconds=60)
    report = await life.end(provider, lease.lease_id, deadline_seconds=1.0)
    assert report.outcome is Outcome.FAILED
    assert report.error is not None
    row = await life.ledger.get(lease.lease_id)
    assert row is not None
    assert (row.state, row.attempts) == (LeaseState.ENDING, 1)
    again = await life.end(provider, lease.lease_id)
    assert again.outcome is Outcome.DESTROYED
    assert service.sandboxes() == []


async def test_already_gone_is_silent(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider)
    await provider.destroy(lease.lease_id)
    report = await life.end(provider, lease.lease_id)
    assert report.outcome is Outcome.ALREADY_GONE
    assert report.error is None


async def test_when_the_row_was_ended_meanwhile_the_creator_destroys_what_it_got(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.fault("create", hold_seconds=0.3)
    making = asyncio.ensure_future(make(life, provider))
    await asyncio.sleep(0.1)
    guardian = SqliteLedger(life.path / "ledger.db")
    (row,) = await guardian.leases()
    await guardian.change(row.lease_id, LeaseState.ENDING, before={LeaseState.INTENDED})
    with pytest.raises(SandboxGone):
        await making
    assert service.sandboxes() == []


@pytest.mark.parametrize(
    ("policy", "failed", "kept"),
    [
        (Keep.NEVER, True, False),
        (Keep.ON_FAILURE, False, False),
        (Keep.ON_FAILURE, True, True),
        (Keep.ALWAYS, False, True),
    ],
)
async def test_keep_policy(
    life: Lifecycle,
    provider: FaultyProvider,
    service: FaultyService,
    caplog: pytest.LogCaptureFixture,
    policy: Keep,
    failed: bool,
    kept: bool,
) -> None:
    lease = await make(life, provider, keep=policy, keep_for_seconds=3600)
    report = await life.end(provider, lease.lease_id, failed=failed)
    row = await life.ledger.get(lease.lease_id)
    assert row is not None
    if not kept:
        assert report.outcome is Outcome.DESTROYED
        assert service.sandboxes() == []
        return
    assert report.outcome is Outcome.KEPT
    assert row.state is LeaseState.KEPT
    assert row.kept_until is not None
    assert 3500 < row.kept_until - time.time() <= 3600
    info = await provider.get(lease.lease_id)
    assert info.expires_at is not None
    assert info.expires_at.timestamp() - time.time() > 3500
    assert f"shell {lease.lease_id}" in caplog.text
    assert f"rm {lease.lease_id}" in caplog.text
    assert await life.destroy(provider, lease.lease_id)
    assert service.sandboxes() == []


async def test_adopting_moves_the_ownership_and_the_old_owner_lets_go(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService, tmp_path: Path
) -> None:
    lease = await make(life, provider)
    other = Lifecycle(
        ledger=SqliteLedger(tmp_path / "ledger.db"), path=tmp_path, owner=replace(Owner.current(), pid=1)
    )
    adopted = await other.adopt(provider, lease.lease_id, session="theirs", take=True)
    assert adopted.owner == other.owner
    for _ in range(2):
        report = await life.end(provider, lease.lease_id)
        assert report.outcome is Outcome.LEFT
        assert str(other.owner.pid) in report.why
        assert service.sandboxes() == [lease.lease_id]
    assert (await other.end(provider, lease.lease_id)).outcome is Outcome.DESTROYED


async def test_adopting_what_this_ledger_does_not_know_writes_it_down(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    service.make_foreign("somebody-elses")
    lease = await life.adopt(provider, "somebody-elses")
    assert (await life.end(provider, lease.lease_id)).outcome is Outcome.DESTROYED
    assert service.sandboxes() == []


async def test_what_was_released_ends_only_on_an_explicit_wish(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider)
    await life.release(lease.lease_id)
    assert await life._end_everything(failed=False) == []
    await sweep(life.ledger, {"faulty": provider})
    assert (await life.end(provider, lease.lease_id)).outcome is Outcome.LEFT
    assert service.sandboxes() == [lease.lease_id]
    assert await life.destroy(provider, lease.lease_id)
    assert service.sandboxes() == []


async def test_a_lease_is_renewed_while_its_owner_lives_and_runs_out_after(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_LEASE_SECONDS", "1.2")
    lease = await make(life, provider)
    await asyncio.sleep(2.5)
    assert service.sandboxes() == [lease.lease_id]
    life.held.clear()  # the owner is no more; nobody ends it
    await asyncio.sleep(2.0)
    assert service.sandboxes() == []


async def test_the_lifetime_the_user_set_is_never_passed_by_renewal(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_LEASE_SECONDS", "60")
    lease = await make(life, provider, max_lifetime_seconds=5)
    info = await provider.get(lease.lease_id)
    assert info.expires_at is not None
    assert info.expires_at.timestamp() - time.time() <= 5.1


async def test_everything_ends_in_parallel_under_one_deadline(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    leases = [await make(life, provider) for _ in range(20)]
    service.fault("destroy", hold_seconds=0.3, times=19)
    service.fault("destroy", hold_seconds=60)
    started = time.monotonic()
    reports = await life._end_everything(failed=False, seconds=3.0)
    assert time.monotonic() - started < 6.0  # one after the other would take longer than the one deadline
    assert sorted(report.outcome for report in reports).count(Outcome.DESTROYED) == 19
    left = [await life.ledger.get(lease.lease_id) for lease in leases]
    assert sum(row is not None and row.state is LeaseState.ENDING for row in left) == 1


# Sweep.


def dead_owner() -> Owner:
    return replace(Owner.current(), start_time=1)


async def orphan(life: Lifecycle, provider: FaultyProvider, **fields: Any) -> Lease:
    lease = replace(life.new_lease(provider, tags=["job"]), owner=dead_owner(), **fields)
    await life.ledger.intend(lease)
    await provider.create(SandboxSpec(labels=lease.labels))
    await life.ledger.note(lease.lease_id, "", sandbox_id=lease.lease_id, state=LeaseState.LIVE)
    return lease


async def test_sweep_ends_orphans_and_nothing_else(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lost = await orphan(life, provider)
    live = await make(life, provider)
    kept = await make(life, provider, keep=Keep.ALWAYS)
    await life.end(provider, kept.lease_id)
    foreign = {
        service.make_foreign("lowtide-looks-like-ours"),
        service.make_foreign("x", {"lowtide-lease": "01abc", "lowtide-owner": "half-a-set"}),
        service.make_foreign("y", Labels(lease_id="01zzz", ledger_id="another", owner="somebody").as_dict()),
    }
    dry = await sweep(life.ledger, {"faulty": provider}, dry_run=True)
    assert [f.sandbox_id for f in dry if f.action is Action.WOULD_END] == [lost.lease_id]
    assert lost.lease_id in service.sandboxes()
    findings = await sweep(life.ledger, {"faulty": provider})
    assert [f.sandbox_id for f in findings if f.action is Action.ENDED] == [lost.lease_id]
    assert set(service.sandboxes()) == {live.lease_id, kept.lease_id, *foreign}
    why = {f.sandbox_id: f.why for f in findings if f.action is Action.LEFT}
    assert "is alive" in why[live.lease_id]
    assert "kept" in why[kept.lease_id]
    assert "another ledger" in why["y"]


async def test_sweep_narrows_by_tag_and_age(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    young = await orphan(life, provider)
    old = await orphan(life, provider, created_at=time.time() - 7200)
    findings = await sweep(life.ledger, {"faulty": provider}, tags=["nobody"])
    assert findings == []
    findings = await sweep(life.ledger, {"faulty": provider}, tags=["job"], older_than_seconds=3600)
    assert [f.sandbox_id for f in findings if f.action is Action.ENDED] == [old.lease_id]
    assert service.sandboxes() == [young.lease_id]


async def test_sweep_finishes_what_an_acknowledged_delete_left(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider)
    await life.end(provider, lease.lease_id)
    service.make_foreign(lease.lease_id, lease.labels.as_dict())  # still there after all
    findings = await sweep(life.ledger, {"faulty": provider})
    assert [f.action for f in findings] == [Action.ENDED]
    assert service.sandboxes() == []


async def test_sweep_leaves_the_sandboxes_of_another_machine(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await orphan(life, provider)
    await life.ledger.note(lease.lease_id, "", owner=replace(lease.owner, machine_id="another"))
    (finding,) = await sweep(life.ledger, {"faulty": provider})
    assert finding.action is Action.LEFT
    assert service.sandboxes() == [lease.lease_id]


async def test_sweep_ends_a_kept_one_after_its_time(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease = await make(life, provider, keep=Keep.ALWAYS, keep_for_seconds=0.1)
    await life.end(provider, lease.lease_id)
    await asyncio.sleep(0.2)
    await sweep(life.ledger, {"faulty": provider})
    assert service.sandboxes() == []
    assert (await settled(life, lease.lease_id)).state is LeaseState.GONE


async def test_sweep_reports_what_it_could_not_end_and_goes_on(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    for _ in range(3):
        await orphan(life, provider)
    service.fault("destroy", hold_seconds=30)
    findings = await sweep(life.ledger, {"faulty": provider}, deadline_seconds=1.0)
    assert sorted(f.action for f in findings) == [Action.ENDED, Action.ENDED, Action.FAILED]
    findings = await sweep(life.ledger, {"faulty": provider})
    assert [f.action for f in findings] == [Action.ENDED]
    assert service.sandboxes() == []


async def test_a_key_that_does_not_show_a_sandbox_settles_nothing_and_one_that_does_ends_it(
    life: Lifecycle, service: FaultyService
) -> None:
    old, new = FaultyProvider(service.directory, "old"), FaultyProvider(service.directory, "new")
    assert old.account != new.account
    lost = await orphan(life, old)
    (record,) = (service.directory / "sandboxes").iterdir()
    aside = record.rename(service.directory / "aside")  # as from another account
    (finding,) = await sweep(life.ledger, {"faulty": new})
    assert finding.action is Action.LEFT
    assert "another faulty key" in finding.why
    row = await life.ledger.get(lost.lease_id)
    assert row is not None
    assert row.state is LeaseState.LIVE
    aside.rename(record)
    (finding,) = await sweep(life.ledger, {"faulty": new}, dry_run=True)
    assert finding.action is Action.WOULD_END
    (finding,) = await sweep(life.ledger, {"faulty": new})
    assert finding.action is Action.ENDED
    assert service.sandboxes() == []


async def test_an_end_that_fails_with_an_error_of_the_sdk_is_tried_again(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, destroy, calls = await make(life, provider), provider.destroy, 0

    async def odd_first(sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("code")  # an SDK that cannot read an answer
        return await destroy(sandbox_id, grace_seconds=grace_seconds)

    monkeypatch.setattr(provider, "destroy", odd_first)
    report = await life.end(provider, lease.lease_id)
    assert report.outcome is Outcome.FAILED
    assert isinstance(report.error, KeyError)
    await settled(life, lease.lease_id)
    assert service.sandboxes() == []


async def test_renewal_outlives_an_error_of_the_sdk(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_LEASE_SECONDS", "0.8")
    renew, calls = provider.renew, 0

    async def odd_first(sandbox_id: str, lifetime_seconds: float) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("code")
        return await renew(sandbox_id, lifetime_seconds)

    monkeypatch.setattr(provider, "renew", odd_first)
    lease = await make(life, provider)
    deadline = time.monotonic() + 10
    while calls < 3:
        assert time.monotonic() < deadline, "nobody renews it any more"
        await asyncio.sleep(0.02)
    await life.end(provider, lease.lease_id)


async def test_what_is_to_be_kept_longer_than_its_account_allows_is_kept_as_long_as_that_allows(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, renew = await make(life, provider, keep=Keep.ALWAYS, keep_for_seconds=86_400.0), provider.renew

    async def an_hour_at_most(sandbox_id: str, lifetime_seconds: float) -> Any:
        if lifetime_seconds > 3600:
            raise ValidationError("Timeout cannot be greater than 1 hours", provider="faulty")
        return await renew(sandbox_id, lifetime_seconds)

    monkeypatch.setattr(provider, "renew", an_hour_at_most)
    report = await life.end(provider, lease.lease_id)
    assert report.outcome is Outcome.KEPT
    row = await life.ledger.get(lease.lease_id)
    assert row is not None
    assert row.state is LeaseState.KEPT
    assert row.expires_at is not None
    assert 1800 - 60 < row.expires_at - time.time() <= 3600
    await life.end(provider, lease.lease_id, force=True, claim=Claim.ANY)


async def test_an_end_that_is_under_way_does_not_make_the_exit_longer(
    life: Lifecycle, provider: FaultyProvider, service: FaultyService
) -> None:
    lease, other = await make(life, provider), await make(life, provider)
    service.fault("destroy", hold_seconds=30)
    slow = asyncio.ensure_future(life.end(provider, lease.lease_id, deadline_seconds=60.0))
    while service.pending():
        await asyncio.sleep(0.01)
    started = time.monotonic()
    reports = await life._end_everything(failed=False, seconds=1.0)
    assert time.monotonic() - started < 10
    assert sorted(report.outcome for report in reports) == [Outcome.DESTROYED, Outcome.FAILED]
    assert (await settled(life, other.lease_id)).state is LeaseState.GONE
    row = await life.ledger.get(lease.lease_id)
    assert row is not None
    assert row.state is LeaseState.ENDING  # the guardian goes on from there
    under_way = life.held[lease.lease_id].ending
    assert under_way is not None
    under_way.cancel()
    await asyncio.wait([slow])
    assert (await life.end(provider, lease.lease_id)).outcome is Outcome.DESTROYED
