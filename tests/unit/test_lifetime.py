"""The provider-side lifetime in the create call: whatever is lost, a hosted sandbox ends."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.lifecycle import lease_rows
from lowtide.lifecycle.lease import Lease
from lowtide.lifecycle.owner import Owner
from lowtide.lifecycle.provider_lifetime import with_lifetime
from lowtide.lifecycle.recover import recovery_spec
from lowtide.providers import registry
from lowtide.providers.base import Capability, SandboxSpec

WEEK = 7 * 86_400.0


def lease(**fields: Any) -> Lease:
    return Lease(
        lease_id="l",
        provider="p",
        account="a",
        owner=Owner.current(),
        ledger_id="x",
        created_at=0.0,
        **fields,
    )


@pytest.mark.parametrize("name", sorted(registry.known()))
def test_what_outlives_this_machine_has_an_end_from_the_start(name: str) -> None:
    provider: Any = registry.provider_class(name)
    if not provider.traits.outlives_machine:
        pytest.skip("it ends with this machine")
    assert Capability.LIFETIME in provider.capabilities
    written = lease()
    row, spec = with_lifetime(provider, written, SandboxSpec(labels=written.labels))
    assert spec.lifetime_seconds is not None
    assert 0 < spec.lifetime_seconds <= WEEK
    assert row.expires_at == spec.lifetime_seconds


@pytest.mark.parametrize("name", sorted(registry.known()))
def test_a_lost_create_is_looked_for_as_long_as_is_documented(name: str) -> None:
    """docs/what-if-my-process-dies.md. No less than a request to the service may take."""
    provider: Any = registry.provider_class(name)
    assert provider.traits.create_window_seconds == (60.0 if provider.traits.outlives_machine else 2.0)


def test_beside_a_renewed_lifetime_the_fixed_end_is_what_was_asked_for_or_the_default() -> None:
    provider: Any = registry.provider_class("kubernetes")
    for asked, renewed, fixed in (
        (None, 300.0, WEEK),
        (30 * 86_400.0, 300.0, 30 * 86_400.0),
        (9.0, 9.0, 9.0),
    ):
        written = lease(max_lifetime_at=asked)
        _, spec = with_lifetime(provider, written, SandboxSpec(labels=written.labels))
        assert (spec.lifetime_seconds, spec.fixed_lifetime_seconds) == (renewed, fixed)


def test_a_create_in_another_namespace_is_looked_for_there_also_by_who_knows_only_the_row() -> None:
    from lowtide.providers.kubernetes.options import KubernetesOptions

    provider: Any = registry.provider_class("kubernetes")
    written = lease()
    asked = SandboxSpec(labels=written.labels, image="busybox", options=KubernetesOptions(namespace="other"))
    row, _ = with_lifetime(provider, written, asked)
    read = lease_rows.from_row(lease_rows.to_row(row), row.ledger_id)
    found = recovery_spec(provider, read)
    assert (found.image, found.options.namespace) == ("busybox", "other")
    row, _ = with_lifetime(provider, written, SandboxSpec(labels=written.labels))
    assert recovery_spec(provider, row).options is None
