"""Lists of sandboxes: filters, order, and pages by cursor."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multidict import MultiMapping

from lowtide.emulators.daytona.answers import Refused, number_in, strings_of, timestamp
from lowtide.emulators.daytona.sandbox import Sandbox
from lowtide.emulators.request_check import parse_json

_PAGE = 100
_KEYS: Mapping[str, Callable[[Sandbox], Any]] = {
    "id": lambda s: s.sandbox_id,
    "name": lambda s: s.name,
    "state": lambda s: str(s.state),
    "snapshot": lambda s: s.snapshot or "",
    "region": lambda s: s.target,
    "cpu": lambda s: s.cpu,
    "memoryGib": lambda s: s.memory,
    "diskGib": lambda s: s.disk,
    "updatedAt": lambda s: s.updated_at,
    "lastActivityAt": lambda s: s.last_activity_at,
    "lastEvent": lambda s: s.last_activity_at,
    "createdAt": lambda s: s.created_at,
    "autoDestroyAt": lambda s: s.destroy_at if s.destroy_at is not None else float("inf"),
}
_BOUNDS: Mapping[str, Callable[[Sandbox], float]] = {
    "Cpu": lambda s: s.cpu,
    "MemoryGiB": lambda s: s.memory,
    "DiskGiB": lambda s: s.disk,
}
_TIMES: Mapping[str, Callable[[Sandbox], float | None]] = {
    "createdAt": lambda s: s.created_at,
    "lastEvent": lambda s: s.last_activity_at,
    "autoDestroyAt": lambda s: s.destroy_at,
}


def page_of(
    candidates: Sequence[Sandbox], query: MultiMapping[str], *, limit: int | None = None
) -> tuple[list[Sandbox], str | None]:
    """The page the query asks for, and the cursor of the next one."""
    accepted = [sandbox for sandbox in candidates if all(test(sandbox) for test in _tests(query))]
    key = _KEYS.get(query.get("sort", "createdAt"), _KEYS["createdAt"])
    accepted.sort(key=lambda s: (key(s), s.sandbox_id), reverse=query.get("order", "desc") != "asc")
    if limit is None:
        limit = number_in(query.get("limit", str(_PAGE)), "limit", largest=200)
    start = 0
    if query.get("cursor"):
        after = _decode(query["cursor"])
        ids = [s.sandbox_id for s in accepted]
        # What ended since is looked for by its place: skipping nothing matters more than order.
        start = ids.index(after["id"]) + 1 if after["id"] in ids else min(after["at"], len(ids))
    page = accepted[start : start + limit]
    if start + limit >= len(accepted) or not page:
        return page, None
    return page, _encode({"id": page[-1].sandbox_id, "at": start + limit})


def _tests(query: MultiMapping[str]) -> list[Callable[[Sandbox], bool]]:
    tests: list[Callable[[Sandbox], bool]] = []
    labels = _labels(query.get("labels"))
    if labels:
        tests.append(lambda s: all(s.labels.get(k) == v for k, v in labels.items()))
    states = _many(query, "states")
    if states:
        tests.append(lambda s: str(s.state) in states)
    snapshots = _many(query, "snapshots")
    if snapshots:
        tests.append(lambda s: s.snapshot in snapshots)
    regions = _many(query, "regionIds") + _many(query, "regions")
    if regions:
        tests.append(lambda s: s.target in regions)
    if identifier := query.get("id"):
        tests.append(lambda s: s.sandbox_id.startswith(identifier))
    if name := query.get("name"):
        tests.append(lambda s: s.name.startswith(name))
    if public := query.get("isPublic"):
        tests.append(lambda s: s.public is (public.lower() == "true"))
    if recoverable := query.get("isRecoverable"):
        tests.append(lambda s: s.recoverable is (recoverable.lower() == "true"))
    for suffix, value in _BOUNDS.items():
        tests += _between(query, f"min{suffix}", f"max{suffix}", value, _finite)
    for prefix, moment in _TIMES.items():
        tests += _between(query, f"{prefix}After", f"{prefix}Before", moment, timestamp)
    return tests


def _between(
    query: MultiMapping[str],
    lowest: str,
    highest: str,
    value: Callable[[Sandbox], float | None],
    read: Callable[[str, str], float],
) -> list[Callable[[Sandbox], bool]]:
    tests: list[Callable[[Sandbox], bool]] = []
    try:
        if lowest in query:
            low = read(query[lowest], lowest)
            tests.append(lambda s: (found := value(s)) is not None and found >= low)
        if highest in query:
            high = read(query[highest], highest)
            tests.append(lambda s: (found := value(s)) is not None and found <= high)
    except ValueError:
        raise Refused(400, f"{lowest} or {highest} is not a number") from None
    return tests


def _finite(text: str, name: str) -> float:
    value = float(text) if text.isascii() else math.nan
    if not math.isfinite(value):
        raise ValueError(name)
    return value


def _many(query: MultiMapping[str], name: str) -> list[str]:
    return [word for given in query.getall(name, []) for word in given.split(",") if word]


def _labels(text: str | None) -> dict[str, str]:
    try:
        return strings_of(parse_json(text.encode()) if text else None, "labels")
    except ValueError:
        raise Refused(400, "Invalid JSON in labels filter") from None


def _encode(place: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def _decode(cursor: str) -> dict[str, Any]:
    try:
        place = parse_json(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return {"id": str(place["id"]), "at": max(0, int(place["at"]))}
    except (binascii.Error, ValueError, KeyError, TypeError):
        raise Refused(400, "Invalid cursor") from None
