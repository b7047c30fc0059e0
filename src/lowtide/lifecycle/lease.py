"""Leases: the right of a sandbox to exist. Plain data, no I/O."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.owner import Owner

if TYPE_CHECKING:
    from lowtide.providers.base import Labels

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case


def new_lease_id(now: float | None = None) -> str:
    """A lowercase ULID: sorts by time, fits every provider's name, key and label rules."""
    value = (int((time.time() if now is None else now) * 1000) << 80) | secrets.randbits(80)
    digits = []
    for _ in range(26):
        value, digit = divmod(value, 32)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


class LeaseState(enum.StrEnum):
    """INTENDED -> LIVE -> ENDING -> GONE; aside KEPT and HANDED_OVER."""

    INTENDED = "intended"  # written down; the provider may or may not have made it
    LIVE = "live"  # the id is known
    ENDING = "ending"  # somebody is ending it; tried again until confirmed
    KEPT = "kept"  # survives its owner until kept_until
    HANDED_OVER = "handed-over"  # released: nobody here ends it
    GONE = "gone"  # the provider confirmed


class Keep(enum.StrEnum):
    """When a sandbox survives its end."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One row of the ledger. Times are Unix seconds."""

    lease_id: str
    provider: str
    account: str
    owner: Owner
    ledger_id: str
    state: LeaseState = LeaseState.INTENDED
    sandbox_id: str | None = None
    tags: tuple[str, ...] = ()
    session: str | None = None
    keep: Keep = Keep.NEVER
    keep_for_seconds: float = 86_400.0
    created_at: float = field(default_factory=time.time)
    expires_at: float | None = None
    """The hard end the provider was told; renewed where it can be."""
    max_lifetime_at: float | None = None
    """The end the user asked for; never moved."""
    lifetime_seconds: float | None = None
    """What each renewal asks for; None where the provider does not renew."""
    kept_until: float | None = None
    attempts: int = 0
    """How often ending it has failed."""
    reason: str | None = None
    """Why it is in this state, for people."""
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """What finding a lost create needs (image, options by value). Never a secret, never the environment."""

    began: Instant | None = None
    """When it was made, on the machine's own clock."""
    renewed: Instant | None = None
    """When the provider was last told to let it live, on the machine's own clock."""
    request_ended: Instant | None = None
    """When a create without an answer was over: from then on the create window runs."""

    def renewal_due(self, share: float) -> bool:
        """Whether less than `share` of the renewable lifetime is left."""
        if self.lifetime_seconds is None:
            return False
        since = self.renewed.elapsed() if self.renewed is not None else None
        return since is None or self.lifetime_seconds - since < self.lifetime_seconds * share

    def life_left(self) -> float | None:
        """The seconds until the end the user set; None where none was set."""
        if self.max_lifetime_at is None:
            return None
        age = self.began.elapsed() if self.began is not None else None
        if age is None:  # from before a restart, or from another machine: only the wall clock can tell
            return self.max_lifetime_at - time.time()
        return self.max_lifetime_at - self.created_at - age

    @property
    def labels(self) -> Labels:
        from lowtide.providers.base import Labels  # late: reading the ledger needs no provider

        return Labels(
            lease_id=self.lease_id,
            ledger_id=self.ledger_id,
            owner=self.owner.label,
            tags=self.tags,
            session=self.session,
        )


LEASE_SECONDS = 300.0
"""What a renewing provider is told at create and at each renewal; ``LOWTIDE_LEASE_SECONDS`` overrides it."""


def renewal_seconds(lease: Lease) -> float:
    """How long the next renewal asks for: the lease's own step, but never past the end the user set."""
    step = lease.lifetime_seconds or LEASE_SECONDS
    left = lease.life_left()
    return step if left is None else min(step, max(1.0, left))


class Outcome(enum.StrEnum):
    """What ending a sandbox came to."""

    DESTROYED = "destroyed"
    STOPPED = "stopped"
    KEPT = "kept"
    LEFT = "left"  # nothing was done: it is another process's, or was released
    ALREADY_GONE = "already_gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReport:
    """What happened when a sandbox was ended: what `stop()` and `close()` answer with."""

    outcome: Outcome
    sandbox_id: str | None
    provider: str
    seconds: float
    why: str = ""
    snapshot_id: str | None = None
    error: BaseException | None = None
