"""How long a sandbox may live on its provider when everything of ours is gone."""

from __future__ import annotations

import os
from dataclasses import replace

from lowtide.lifecycle.lease import LEASE_SECONDS, Lease
from lowtide.providers.base import Capability, Provider, SandboxSpec


def lease_seconds(provider: Provider) -> float | None:
    """How far ahead a renewed lifetime reaches; None where the provider cannot renew one."""
    if not {Capability.LIFETIME, Capability.RENEW} <= provider.capabilities:
        return None
    seconds = float(os.environ.get("LOWTIDE_LEASE_SECONDS", LEASE_SECONDS))
    most = provider.traits.max_lifetime_seconds
    return min(seconds, most) if most else seconds


def with_lifetime(provider: Provider, lease: Lease, spec: SandboxSpec) -> tuple[Lease, SandboxSpec]:
    """Put the hard provider-side lifetime into the create call, and remember it in the row."""
    asked = None
    if lease.max_lifetime_at is not None:
        asked = lease.max_lifetime_at - lease.created_at
    step = lease_seconds(provider)
    lifetime = asked
    if step is not None:
        lifetime = min(step, asked) if asked is not None else step
    elif Capability.LIFETIME in provider.capabilities and lifetime is None:
        lifetime = provider.traits.default_lifetime_seconds
    lease = replace(
        lease,
        lifetime_seconds=step,
        expires_at=lease.created_at + lifetime if lifetime is not None else None,
        recovery={k: v for k, v in (("image", spec.image), ("snapshot", spec.snapshot)) if v is not None},
    )
    fixed = asked if asked is not None else provider.traits.default_lifetime_seconds
    return lease, replace(
        spec, lifetime_seconds=lifetime, fixed_lifetime_seconds=fixed if step is not None else None
    )
