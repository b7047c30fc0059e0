"""What E2B's control plane answers about a sandbox and a snapshot, and how it writes times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lowtide.emulators.e2b.model import ENVD_VERSION, BadRequest, Sandbox


def created(sandbox: Sandbox) -> dict[str, Any]:
    described: dict[str, Any] = {
        "templateID": sandbox.template_id,
        "sandboxID": sandbox.sandbox_id,
        "clientID": "6532622b",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": sandbox.envd_token,
        "trafficAccessToken": sandbox.traffic_token,
        "alias": sandbox.alias,
    }
    return {key: value for key, value in described.items() if value is not None}


def listed(sandbox: Sandbox) -> dict[str, Any]:
    described = {
        "templateID": sandbox.template_id,
        "alias": sandbox.alias,
        "sandboxID": sandbox.sandbox_id,
        "clientID": "6532622b",
        "startedAt": rfc3339(sandbox.started_at),
        "endAt": rfc3339(sandbox.end_at),
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "metadata": sandbox.metadata,
        "state": sandbox.state,
        "envdVersion": ENVD_VERSION,
        "volumeMounts": sandbox.volume_mounts,
    }
    return {key: value for key, value in described.items() if value is not None}


def described_snapshot(snapshot: Any) -> dict[str, Any]:
    return {"snapshotID": snapshot.snapshot_id, "names": [snapshot.name] if snapshot.name else []}


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def timestamp(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError:
        raise BadRequest("not a time") from None
