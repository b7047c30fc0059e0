"""A lease as a row of the SQLite ledger: the tables, and a lease there and back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from lowtide import machine
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.lease import Keep, Lease, LeaseState
from lowtide.lifecycle.owner import Owner

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lease (
  lease_id TEXT PRIMARY KEY, provider TEXT NOT NULL, account TEXT NOT NULL, state TEXT NOT NULL,
  sandbox_id TEXT, host TEXT NOT NULL, boot_id TEXT NOT NULL, pid INTEGER NOT NULL, start_time INTEGER NOT NULL,
  tags TEXT NOT NULL, session TEXT, keep TEXT NOT NULL, keep_for_seconds REAL NOT NULL, created_at REAL NOT NULL,
  expires_at REAL, max_lifetime_at REAL, lifetime_seconds REAL, kept_until REAL, attempts INTEGER NOT NULL,
  reason TEXT, recovery TEXT NOT NULL, changed_at REAL NOT NULL,
  machine_id TEXT NOT NULL DEFAULT '', namespace TEXT NOT NULL DEFAULT '', image TEXT NOT NULL DEFAULT '',
  life TEXT NOT NULL DEFAULT '', began TEXT, renewed TEXT, request_ended TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lease_state ON lease (state);
CREATE INDEX IF NOT EXISTS lease_sandbox ON lease (sandbox_id, provider);
CREATE TABLE IF NOT EXISTS history (
  lease_id TEXT NOT NULL, at REAL NOT NULL, before TEXT, after TEXT NOT NULL, pid INTEGER NOT NULL, why TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS history_lease ON history (lease_id);
"""
_COLUMNS = [
    "lease_id",
    "provider",
    "account",
    "state",
    "sandbox_id",
    "host",
    "boot_id",
    "pid",
    "start_time",
    "tags",
    "session",
    "keep",
    "keep_for_seconds",
    "created_at",
    "expires_at",
    "max_lifetime_at",
    "lifetime_seconds",
    "kept_until",
    "attempts",
    "reason",
    "recovery",
    "changed_at",
    "machine_id",
    "namespace",
    "image",
    "life",
    "began",
    "renewed",
    "request_ended",
]
_INSTANTS = ("began", "renewed", "request_ended")
_OWNER = ("host", "boot_id", "pid", "start_time", "machine_id", "namespace", "image", "life")
OWNER_COLUMNS = ", ".join(_OWNER)
INSERT = f"INSERT INTO lease ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
SELECT = f"SELECT {', '.join(_COLUMNS)} FROM lease"
VERSION = "4"

_STEPS = {
    "2": [
        f"ALTER TABLE lease ADD COLUMN {name} TEXT NOT NULL DEFAULT ''"
        for name in ("machine_id", "namespace", "image", "life")
    ],
    "3": [f"ALTER TABLE lease ADD COLUMN {name} TEXT" for name in _INSTANTS],
    "4": ["CREATE INDEX IF NOT EXISTS lease_state ON lease (state)", "DROP INDEX IF EXISTS lease_open"],
}
UPGRADES = {
    written: [statement for version, step in _STEPS.items() if version > written for statement in step]
    for written in ("1", *_STEPS)
    if written != VERSION
}
"""From each earlier version to this one: the statements that bring the tables along."""


def written(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """A field of a lease as columns and what stands in them."""
    if name == "owner":
        return [(column, getattr(value, column)) for column in _OWNER]
    if name in ("tags", "recovery"):
        return ((name, json.dumps(value)),)
    if name in _INSTANTS:
        return ((name, _text(value)),)
    return ((name, str(value) if name in ("state", "keep") else value),)


def _text(instant: Instant | None) -> str | None:
    return str(instant) if instant is not None else None


def to_row(lease: Lease) -> tuple[Any, ...]:
    owner = lease.owner
    return (
        lease.lease_id,
        lease.provider,
        lease.account,
        str(lease.state),
        lease.sandbox_id,
        owner.host,
        owner.boot_id,
        owner.pid,
        owner.start_time,
        json.dumps(lease.tags),
        lease.session,
        str(lease.keep),
        lease.keep_for_seconds,
        lease.created_at,
        lease.expires_at,
        lease.max_lifetime_at,
        lease.lifetime_seconds,
        lease.kept_until,
        lease.attempts,
        lease.reason,
        json.dumps(dict(lease.recovery)),
        time.time(),
        owner.machine_id,
        owner.namespace,
        owner.image,
        owner.life,
        *(_text(getattr(lease, name)) for name in _INSTANTS),
    )


def from_row(row: tuple[Any, ...], ledger_id: str) -> Lease:
    """Raises ValueError or TypeError for a row that is damaged: everybody else relies on what a lease says."""
    r = dict(zip(_COLUMNS, row, strict=True))
    del r["changed_at"]
    _check(r)
    owner = to_owner([r.pop(column) for column in _OWNER])
    r["state"], r["keep"] = LeaseState(r["state"]), Keep(r["keep"])
    r["tags"], r["recovery"] = tuple(json.loads(r["tags"])), json.loads(r["recovery"])
    if not isinstance(r["recovery"], dict) or not all(isinstance(tag, str) for tag in r["tags"]):
        raise ValueError("its tags or its recovery are not what lowtide writes")
    r.update({name: Instant.read(r[name]) for name in _INSTANTS})
    return Lease(owner=owner, ledger_id=ledger_id, **r)


_NUMBERS = {"start_time", "keep_for_seconds", "created_at", "attempts"}
_NUMBERS_OR_NONE = {"expires_at", "max_lifetime_at", "lifetime_seconds", "kept_until"}
_TEXT_OR_NONE = {"sandbox_id", "session", "reason", *_INSTANTS}
_HIGHEST = 2**53


def _check(r: dict[str, Any]) -> None:
    """SQLite keeps whatever was written into a column, of any type."""
    for name, value in r.items():
        if name == "pid":
            right = isinstance(value, int) and 0 < value < 2**31
        elif name in _NUMBERS | _NUMBERS_OR_NONE:
            right = isinstance(value, int | float) and 0 <= value < _HIGHEST
        else:
            right = isinstance(value, str)
        if not right and not (value is None and name in _NUMBERS_OR_NONE | _TEXT_OR_NONE):
            raise ValueError(f"{name} is {str(value)[:40]!r}")


def to_owner(values: Iterable[Any]) -> Owner:
    """An owner from the columns of `OWNER_COLUMNS`."""
    r = dict(zip(_OWNER, values, strict=True))
    if not r["machine_id"]:
        # Written before the machine had a column of its own: its number stands behind its name.
        name, _, number = r["host"].rpartition(".")
        mine = number and number == machine.machine_number()[:12]
        r["machine_id"] = machine.machine_id() if mine else f"earlier {r['host']}"
        r["host"] = name or r["host"]
    return Owner(**r)
