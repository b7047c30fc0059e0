"""What Daytona is asked for when a sandbox is made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import LABEL_PREFIX, NetworkMode, SandboxSpec
from lowtide.providers.daytona.errors import SERVICE
from lowtide.providers.daytona.options import DaytonaOptions

if TYPE_CHECKING:
    from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

WORKING_DIR = LABEL_PREFIX + "cwd"
DEFAULT_LIFETIME = 300.0
_GIB = 1 << 30


def parameters(
    spec: SandboxSpec, default_snapshot: str | None
) -> CreateSandboxFromSnapshotParams | CreateSandboxFromImageParams:
    """Raises ValidationError for what Daytona could only refuse."""
    from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Resources, VolumeMount

    options = hosted.options_of(spec, DaytonaOptions, "daytona")
    image, snapshot = spec.image or options.image, spec.snapshot or options.snapshot
    if image is not None and snapshot is not None:
        raise errors.ValidationError(
            "a sandbox starts from a snapshot or from an image", argument="image", provider="daytona"
        )
    # The dead-man's switch: a hard end, and an end by idleness where a server does not know the first.
    lives = minutes(spec.lifetime_seconds or DEFAULT_LIFETIME)
    labels = hosted.labels_of(spec, options.labels, "daytona")
    if spec.working_dir is not None:
        labels[WORKING_DIR] = spec.working_dir
    asked: dict[str, Any] = {
        "name": spec.lease_id,
        "language": "python",
        "labels": labels,
        "env_vars": dict(spec.environment),
        "public": options.public,
        "ttl_minutes": lives,
        "auto_stop_interval": lives if options.auto_stop_minutes is None else options.auto_stop_minutes,
        "auto_delete_interval": options.auto_delete_minutes,
        **_network(spec),
    }
    chosen = {
        "auto_archive_interval": options.auto_archive_minutes,
        "target": options.target,
        "os_user": options.user,
    }
    asked.update({name: value for name, value in chosen.items() if value is not None})
    if options.volumes:
        asked["volumes"] = [
            VolumeMount(volume_id=volume, mount_path=path) for path, volume in options.volumes.items()
        ]
    if options.secrets:
        asked["secrets"] = dict(options.secrets)
    if options.spot:
        asked["spot"] = True
    if image is None:
        if any(getattr(spec.limits, name) is not None for name in ("cpu", "memory_bytes", "disk_bytes")):
            raise errors.UnsupportedError(
                "a snapshot has its own processors, memory and disk; limits need an image",
                feature="limits without an image",
                alternative="container_image=…",
                argument="resources",
                provider="daytona",
            )
        return CreateSandboxFromSnapshotParams(snapshot=snapshot or default_snapshot, **asked)
    resources = Resources(
        cpu=_whole("cpu", spec.limits.cpu),
        memory=_whole("memory", spec.limits.memory_bytes, _GIB),
        disk=_whole("disk", spec.limits.disk_bytes, _GIB),
    )
    return CreateSandboxFromImageParams(image=image, resources=resources, **asked)


def minutes(seconds: float) -> int:
    """Daytona counts in minutes: never shorter than asked, and at least one."""
    return max(1, math.ceil(seconds / 60.0))


def _network(spec: SandboxSpec) -> dict[str, Any]:
    if spec.network is None or spec.network.mode is NetworkMode.INTERNET:
        return {}
    if spec.network.mode is NetworkMode.NONE:
        return {"network_block_all": True}
    ranges, names = hosted.only_ipv4(spec.network.allow, SERVICE)
    asked = {}
    if ranges:
        asked["network_allow_list"] = ",".join(ranges)
    if names:
        asked["domain_allow_list"] = ",".join(names)
    return asked or {"network_block_all": True}


def _whole(name: str, value: float | None, unit: int = 1) -> int | None:
    if value is None:
        return None
    if value < unit or value % unit:
        steps = "whole processors" if unit == 1 else "whole GiB"
        raise errors.UnsupportedError(
            f"Daytona gives {name} in {steps}",
            feature=f"{name} of {value:g}{'' if unit == 1 else ' bytes'}",
            alternative=f"{name} in {steps}",
            argument="resources",
            provider="daytona",
        )
    return int(value // unit)
