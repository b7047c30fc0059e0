"""A sandbox as it is asked for, before anything of it exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.emulators.daytona.answers import Refused, rfc3339, strings_of, whole_of
from lowtide.emulators.daytona.machine import known_user
from lowtide.emulators.daytona.sandbox import Intervals, Sandbox
from lowtide.emulators.daytona.storage import hashes_of

if TYPE_CHECKING:
    from lowtide.emulators.daytona.snapshots import Snapshots
    from lowtide.emulators.daytona.volumes import Volumes

REGION = "us"


def draft(
    asked: dict[str, Any],
    *,
    now: float,
    organization_id: str,
    snapshots: Snapshots,
    volumes: Volumes,
    known: Callable[[str], Sandbox],
) -> Sandbox:
    """From the body of a create call; it has no name yet. Refused where the service refuses."""
    build = asked.get("buildInfo")
    snapshot = None
    if build is not None:
        if not isinstance(build, dict) or not isinstance(build.get("dockerfileContent"), str):
            raise Refused(400, "buildInfo.dockerfileContent is required")
        if asked.get("snapshot"):
            raise Refused(400, "Cannot specify both snapshot and buildInfo")
    else:
        snapshot = snapshots.usable(asked.get("snapshot"))
        if any(asked.get(key) is not None for key in ("cpu", "memory", "disk", "gpu")):
            raise Refused(400, "Cannot specify Sandbox resources when using a snapshot")
    user = asked.get("user") or "daytona"
    if not known_user(user):
        raise Refused(400, f"unable to find user {user}: no matching entries in passwd file")
    stop = whole_of(asked.get("autoStopInterval"), "autoStopInterval")
    pause = whole_of(asked.get("autoPauseInterval"), "autoPauseInterval") or 0
    chosen = Intervals(
        stop=stop if stop is not None else 0 if pause else 15,
        pause=pause,
        archive=either(whole_of(asked.get("autoArchiveInterval"), "autoArchiveInterval"), 7 * 24 * 60),
        delete=either(whole_of(asked.get("autoDeleteInterval"), "autoDeleteInterval", lowest=None), -1),
    )
    if chosen.stop and chosen.pause:
        raise Refused(400, "autoStopInterval and autoPauseInterval are mutually exclusive")
    expiry = whole_of(asked.get("ttlMinutes"), "ttlMinutes")
    linked = asked.get("linkedSandbox")
    sandbox = Sandbox(
        organization_id=organization_id,
        name="",
        user=user,
        target=asked.get("target") or REGION,
        snapshot=snapshot.name if snapshot else None,
        environment={**(snapshot.environment if snapshot else {}), **strings_of(asked.get("env"), "env")},
        labels=strings_of(asked.get("labels"), "labels"),
        public=bool(asked.get("public")),
        intervals=chosen,
        created_at=now,
        cpu=either(whole_of(asked.get("cpu"), "cpu", lowest=1), snapshot.cpu if snapshot else 1),
        memory=either(whole_of(asked.get("memory"), "memory", lowest=1), snapshot.memory if snapshot else 1),
        disk=either(whole_of(asked.get("disk"), "disk", lowest=1), snapshot.disk if snapshot else 3),
        gpu=either(whole_of(asked.get("gpu"), "gpu"), 0),
        network={
            key: asked[key]
            for key in ("networkBlockAll", "networkAllowList", "domainAllowList")
            if asked.get(key) is not None
        },
        volumes=volumes.mounts(asked.get("volumes")),
        secrets=asked.get("secrets") or [],
        linked_id=known(linked).sandbox_id if linked else None,
        updated_at=now,
        last_activity_at=now,
        destroy_at=now + expiry * 60 if expiry else None,
        expiry_minutes=expiry,
        base=snapshot.backing_id if snapshot else None,
        workdir=snapshot.workdir if snapshot else "",
    )
    if build is not None:
        moment = rfc3339(now)
        sandbox.build = {
            "dockerfileContent": build["dockerfileContent"],
            "contextHashes": hashes_of(build),
            "createdAt": moment,
            "updatedAt": moment,
            "snapshotRef": f"daytona-{sandbox.sandbox_id}",
        }
    return sandbox


def copy(source: Sandbox, now: float) -> Sandbox:
    """What a fork of it starts with; without a name, and without the files."""
    return Sandbox(
        organization_id=source.organization_id,
        name="",
        user=source.user,
        target=source.target,
        snapshot=source.snapshot,
        environment=dict(source.environment),
        labels=dict(source.labels),
        public=source.public,
        intervals=Intervals(
            stop=source.intervals.stop,
            pause=source.intervals.pause,
            archive=source.intervals.archive,
            delete=source.intervals.delete,
        ),
        created_at=now,
        cpu=source.cpu,
        memory=source.memory,
        disk=source.disk,
        gpu=source.gpu,
        network=dict(source.network),
        volumes=list(source.volumes),
        parent_id=source.sandbox_id,
        workdir=source.workdir,
        updated_at=now,
        last_activity_at=now,
    )


def either(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given
