"""A lease as a row of the SQLite ledger: the tables, and a lease there and back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from lowtide.lifecycle.lease import Keep, Lease, LeaseState, Owner

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lease (
  lease_id TEXT PRIMARY KEY, provider TEXT NOT NULL, account TEXT NOT NULL, state TEXT NOT NULL,
  sandbox_id TEXT, host TEXT NOT NULL, boot_id TEXT NOT NULL, pid INTEGER NOT NULL, start_time INTEGER NOT NULL,
  tags TEXT NOT NULL, session TEXT, keep TEXT NOT NULL, keep_for_seconds REAL NOT NULL, created_at REAL NOT NULL,
  expires_at REAL, max_lifetime_at REAL, lifetime_seconds REAL, kept_until REAL, attempts INTEGER NOT NULL,
  reason TEXT, recovery TEXT NOT NULL, changed_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lease_open ON lease (state) WHERE state NOT IN ('gone', 'handed-over');
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
]
_OWNER = ("host", "boot_id", "pid", "start_time")
INSERT = f"INSERT INTO lease ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
SELECT = f"SELECT {', '.join(_COLUMNS)} FROM lease"
VERSION = "1"


def written(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """A field of a lease as columns and what stands in them."""
    if name == "owner":
        return zip(_OWNER, (value.host, value.boot_id, value.pid, value.start_time), strict=True)
    if name in ("tags", "recovery"):
        return ((name, json.dumps(value)),)
    return ((name, str(value) if name in ("state", "keep") else value),)


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
    )


def from_row(row: tuple[Any, ...], ledger_id: str) -> Lease:
    r = dict(zip(_COLUMNS, row, strict=True))
    del r["changed_at"]
    owner = Owner(**{column: r.pop(column) for column in _OWNER})
    r["state"], r["keep"] = LeaseState(r["state"]), Keep(r["keep"])
    r["tags"], r["recovery"] = tuple(json.loads(r["tags"])), json.loads(r["recovery"])
    return Lease(owner=owner, ledger_id=ledger_id, **r)
