"""Faults on demand: what hosted services do on a bad day, named, matched and counted."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import ValidationError


class FaultName(enum.StrEnum):
    """Each emulator maps these to what its service would do; the docs list them all."""

    CREATE_LOST = "create-lost"  # committed, answered with `status` (504)
    CREATE_DROPPED = "create-dropped"  # committed, connection dropped without an answer
    CREATE_SLOW = "create-slow"  # committed after `seconds`
    START_SLOW = "start-slow"  # committed and answered at once, usable after `seconds`
    CREATE_FAILS = "create-fails"  # nothing made, answered with `status` (500)
    CREATE_ERROR_STATE = "create-error-state"  # made, but never usable
    KILL_HANGS = "kill-hangs"  # answers after `seconds`, then does it
    KILL_FAILS = "kill-fails"  # answered with `status` (500), nothing done
    KILL_IGNORED = "kill-ignored"  # acknowledged, but the sandbox stays and stays listed
    LIST_LAGS = (
        "list-lags"  # made less than `seconds` ago: not listed; ended less than that ago: still listed
    )
    RATE_LIMIT = "rate-limit"  # 429 with Retry-After `seconds`
    EXEC_DROPPED = (
        # the connection drops `seconds` after a command started, or after so many bytes; the command goes on
        "exec-dropped"
    )
    GONE_MID_COMMAND = "gone-mid-command"  # the sandbox ends `seconds` after a command started
    STALE_TOKEN = "stale-token"  # a valid key or token is refused  # noqa: S105 - a fault's name
    UNAVAILABLE = "unavailable"  # any call answered with `status` (503)


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault that is armed. `count` calls get it, then it is over; None: until it is removed.

    `match` narrows it down: every pair must be among the facts of the call (``sandbox_id``,
    ``operation``, and the sandbox's own metadata or labels).
    """

    name: FaultName
    provider: str | None = None
    match: Mapping[str, str] = field(default_factory=dict)
    count: int | None = 1
    seconds: float | None = None
    status: int | None = None
    after_bytes: int | None = None
    fault_id: int = 0
    hits: int = 0

    def fits(self, provider: str, facts: Mapping[str, str]) -> bool:
        if self.provider not in (None, provider):
            return False
        if self.count is not None and self.hits >= self.count:
            return False
        return all(facts.get(key) == value for key, value in self.match.items())

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.fault_id,
            "name": str(self.name),
            "provider": self.provider,
            "match": dict(self.match),
            "count": self.count,
            "seconds": self.seconds,
            "status": self.status,
            "after_bytes": self.after_bytes,
            "hits": self.hits,
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Fault:
        """From the admin endpoint's JSON; ValidationError says what is wrong."""
        unknown = set(given) - {"name", "provider", "match", "count", "seconds", "status", "after_bytes"}
        if unknown:
            raise ValidationError(f"a fault has no {sorted(unknown)[0]!r}", argument="fault")
        try:
            name = FaultName(str(given.get("name", "")))
        except ValueError:
            known = ", ".join(FaultName)
            raise ValidationError(
                f"there is no fault {given.get('name')!r}; known: {known}", argument="name"
            ) from None
        count, seconds, status = given.get("count", 1), given.get("seconds"), given.get("status")
        if not (count is None or (type(count) is int and count > 0)):
            raise ValidationError("count is a whole number above 0, or null", argument="count")
        if not (seconds is None or (type(seconds) in (int, float) and 0 <= seconds <= 86_400)):
            raise ValidationError("seconds is a number from 0 to 86400", argument="seconds")
        if not (status is None or (type(status) is int and 400 <= status <= 599)):
            raise ValidationError("status is an HTTP status from 400 to 599", argument="status")
        after = given.get("after_bytes")
        if not (after is None or (type(after) is int and after >= 0)):
            raise ValidationError("after_bytes is a whole number, or null", argument="after_bytes")
        match = given.get("match") or {}
        if not (isinstance(match, dict) and all(isinstance(v, str) for pair in match.items() for v in pair)):
            raise ValidationError("match is an object of strings", argument="match")
        provider = given.get("provider")
        if not (provider is None or isinstance(provider, str)):
            raise ValidationError("provider is a name, or null", argument="provider")
        return cls(
            name=name,
            provider=provider,
            match=match,
            count=count,
            seconds=seconds,
            status=status,
            after_bytes=after,
        )


class Faults:
    """What is armed now. An emulator asks with `take` at each point where a service can fail."""

    def __init__(self) -> None:
        self._armed: dict[int, Fault] = {}
        self._ids = itertools.count(1)

    def add(self, fault: Fault) -> Fault:
        fault.fault_id = next(self._ids)
        self._armed[fault.fault_id] = fault
        return fault

    def remove(self, fault_id: int) -> bool:
        return self._armed.pop(fault_id, None) is not None

    def clear(self) -> None:
        self._armed.clear()

    def armed(self) -> list[Fault]:
        return list(self._armed.values())

    def take(self, name: FaultName, provider: str, facts: Mapping[str, str] | None = None) -> Fault | None:
        """The first armed fault of that name that fits this call, counted; None on a good day."""
        if not self._armed:
            return None
        for fault in self._armed.values():
            if fault.name is name and fault.fits(provider, facts or {}):
                fault.hits += 1
                return fault
        return None
