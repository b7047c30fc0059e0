"""The provider as witness: what it says about a sandbox whose owner cannot be seen from here.

After a restart (or in a clone of a machine) nobody here can tell whether the owner goes on elsewhere.
The lease can: one that nobody has renewed for a whole lease period belongs to nobody. And a sandbox
that is not there any more settles its row, whoever's it is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lowtide.errors import SandboxGone, SandboxNotFoundError
from lowtide.lifecycle.lease import Lease
from lowtide.providers.base import Provider


class Testimony(enum.StrEnum):
    NOT_THERE = "not-there"  # gone from the provider: nothing is left to end
    OVER = "over"  # there, but nothing runs in it, nor ever will
    THERE = "there"
    NOTHING = "nothing"  # no id to ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What the provider said."""

    testimony: Testimony
    expires_at: float | None = None
    """Its own expiry, which moves whenever somebody renews the lease."""


async def ask(provider: Provider, lease: Lease) -> Sighting:
    """Look at the sandbox of this lease. Raises what the provider raises, except that it is not there."""
    if lease.sandbox_id is None:
        return Sighting(testimony=Testimony.NOTHING)
    try:
        info = await provider.get(lease.sandbox_id)
    except (SandboxNotFoundError, SandboxGone):
        return Sighting(testimony=Testimony.NOT_THERE)
    expires_at = info.expires_at.timestamp() if info.expires_at is not None else None
    testimony = Testimony.OVER if info.state.terminal else Testimony.THERE
    return Sighting(testimony=testimony, expires_at=expires_at)
