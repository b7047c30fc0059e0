"""Sandbox spec to container, container to sandbox info. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from lowtide.providers.base import Labels, NetworkMode, SandboxInfo, SandboxSpec, SandboxState
from lowtide.providers.docker.options import DockerOptions
from lowtide.providers.hosted import asked_for
from lowtide.providers.inside import program
from lowtide.providers.network.names import NAMESERVER

DEFAULT_PIDS = 4096
GVISOR_RUNTIME = "runsc"
DEFAULT_MEMORY_BYTES = 4 << 30
NETWORK = "lowtide-full"
"""For sandboxes with a network: they reach out, and not each other. Made once per engine, stays as a cache."""
DIRECTORY = "/.lowtide"
PROGRAM = f"{DIRECTORY}/inside"
CACHE_LABEL = "lowtide-cache"
_CARRIER = "carrier"
_VOLUME = "lowtide-inside-"


def volume_name(architecture: str) -> str:
    return _VOLUME + program.fingerprint(architecture)


def has_network(spec: SandboxSpec) -> bool:
    """Whether it is on the engine's network that lowtide makes."""
    return spec.network is not None and spec.network.mode is NetworkMode.INTERNET


def create_body(
    spec: SandboxSpec, image: str, *, volume: str, publish: bool, key: bytes, network: str | None
) -> dict[str, Any]:
    """The create call's body: identity, lifetime and limits are all inside this one request. `network`: the engine's id
    of the one that lowtide made, where the sandbox has one."""
    options: DockerOptions = spec.options or DockerOptions()
    ports = [f"{port}/tcp" for port in spec.ports if publish and has_network(spec)]
    lifetime = math.ceil(spec.lifetime_seconds) if spec.lifetime_seconds else 0
    return {
        "Image": image,
        # Our PID 1 reaps, passes signals on and holds the lifetime: the engine's own --init could be
        # stopped beside it, and is not installed everywhere.
        "Entrypoint": [PROGRAM, "init", str(lifetime), "0"],
        "Cmd": list(spec.command or ()),
        "Env": [*(f"{k}={v}" for k, v in spec.environment.items()), f"{program.KEY}={key.hex()}"],
        "Labels": spec.labels.as_dict(),
        "StopSignal": "SIGTERM",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host(spec, options, volume, ports, network),
        **asked_for(
            {
                "WorkingDir": spec.working_dir,
                "User": options.user,
                "ExposedPorts": {port: {} for port in ports},
            }
        ),
    }


def _host(
    spec: SandboxSpec, options: DockerOptions, volume: str, ports: list[str], network: str | None
) -> dict[str, Any]:
    """What of the engine's machine it gets."""
    limits, mode = spec.limits, spec.network.mode if spec.network is not None else NetworkMode.NONE
    memory = limits.memory_bytes or DEFAULT_MEMORY_BYTES
    mounts = [
        {"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only}
        for m in options.mounts
    ]
    return asked_for(
        {
            "AutoRemove": True,
            "NetworkMode": network or "none",
            "Dns": [str(NAMESERVER)] if mode is NetworkMode.ALLOW else None,
            "PortBindings": {port: [{"HostIp": "127.0.0.1", "HostPort": ""}] for port in ports},
            "PidsLimit": limits.pids or DEFAULT_PIDS,
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(limits.cpu * 1e9) if limits.cpu else None,
            "ReadonlyRootfs": options.read_only_root,
            "CapDrop": list(options.drop_capabilities),
            "CapAdd": list(options.add_capabilities),
            "SecurityOpt": ["no-new-privileges"] if options.no_new_privileges else None,
            "Mounts": [volume_mount(volume, read_only=True), *mounts],
            "Tmpfs": dict(options.tmpfs),
            "Runtime": GVISOR_RUNTIME if spec.isolation is not None else options.runtime,
            "ShmSize": options.shm_bytes or None,
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m"}},
        }
    )


def carrier_body(spec: SandboxSpec, image: str, *, volume: str) -> dict[str, Any]:
    """A container that is never started: through it the program gets into its volume."""
    return {
        "Image": image,
        "Entrypoint": [PROGRAM],
        "Cmd": [],
        "Labels": {**spec.labels.as_dict(), CACHE_LABEL: _CARRIER},
        "HostConfig": {"NetworkMode": "none", "Mounts": [volume_mount(volume, read_only=False)]},
    }


def network_body() -> dict[str, Any]:
    return {
        "Name": NETWORK,
        "CheckDuplicate": True,
        "Options": {"com.docker.network.bridge.enable_icc": "false"},
        "Labels": {CACHE_LABEL: "network"},
    }


def volume_mount(volume: str, *, read_only: bool) -> dict[str, Any]:
    return {
        "Type": "volume",
        "Source": volume,
        "Target": DIRECTORY,
        "ReadOnly": read_only,
        "VolumeOptions": {"NoCopy": True, "Labels": {CACHE_LABEL: "inside"}},
    }


_STATES = {
    "created": SandboxState.PENDING,
    "configured": SandboxState.PENDING,
    "initialized": SandboxState.PENDING,
    "running": SandboxState.RUNNING,
    "restarting": SandboxState.RUNNING,
    "paused": SandboxState.PAUSED,
    "removing": SandboxState.ENDING,
    "stopping": SandboxState.ENDING,
    "dead": SandboxState.FAILED,
}


def own_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """The container's labels without those that it has from a snapshot's image (blanked by create)."""
    return {k: v for k, v in (labels or {}).items() if v or not k.startswith("lowtide-")}


def from_inspect(answer: Mapping[str, Any]) -> SandboxInfo | None:
    """None for a container that is not one of our sandboxes."""
    labels = own_labels(answer.get("Config", {}).get("Labels"))
    name = _sandbox_id(labels, [str(answer.get("Name", ""))], _has_program(answer))
    if name is None:
        return None
    state = answer.get("State", {})
    code = state.get("ExitCode")
    known = _STATES.get(str(state.get("Status", "")).lower())
    reason = None
    if known is None:
        known = SandboxState.COMPLETED if code == 0 else SandboxState.FAILED
        reason = (
            "oom"
            if state.get("OOMKilled")
            else "expired"
            if code == program.EXPIRED
            else state.get("Error") or "exited"
        )
    created = _time(answer.get("Created"))
    return SandboxInfo(
        sandbox_id=name,
        state=known,
        labels=labels,
        created_at=created,
        exit_code=code if known in (SandboxState.COMPLETED, SandboxState.FAILED) else None,
        reason=reason,
    )


def from_list(answer: Mapping[str, Any]) -> SandboxInfo | None:
    """None for a container that is not one of our sandboxes, or that has another name: `from_inspect` knows."""
    labels = own_labels(answer.get("Labels"))
    name = _sandbox_id(labels, [str(one) for one in answer.get("Names") or ()], renamed=False)
    if name is None:
        return None
    word = str(answer.get("State", "")).lower()
    state = _STATES.get(word)
    if state is None:
        state = SandboxState.COMPLETED if "(0)" in str(answer.get("Status", "")) else SandboxState.FAILED
    created = answer.get("Created")
    when = datetime.fromtimestamp(created, UTC) if isinstance(created, int | float) else _time(created)
    return SandboxInfo(sandbox_id=name, state=state, labels=labels, created_at=when)


def _sandbox_id(labels: Mapping[str, str], names: list[str], renamed: bool) -> str | None:
    """Which sandbox the container with these labels is; None: none of ours.

    The labels alone are no proof, because an image that somebody commits from a sandbox has them, too, and gives them to
    its containers. The container also has our name or, where somebody has renamed it, our program (`renamed`), which no
    image brings.
    """
    full = Labels.from_dict(labels)
    if full is None:
        return None
    usual = (full.lease_id, carrier_name(full.lease_id))
    for name in names:
        if name.lstrip("/") in usual:
            return name.lstrip("/")
    return usual[labels.get(CACHE_LABEL) == _CARRIER] if renamed else None


def _has_program(answer: Mapping[str, Any]) -> bool:
    return any(
        mount.get("Destination") == DIRECTORY and str(mount.get("Name") or "").startswith(_VOLUME)
        for mount in answer.get("Mounts") or ()
    )


def carrier_name(lease_id: str) -> str:
    return f"{lease_id}-carrier"


def lease_of(sandbox_id: str) -> str:
    return sandbox_id.removesuffix("-carrier")


def created_now(spec: SandboxSpec) -> SandboxInfo:
    now = datetime.now(UTC)
    return SandboxInfo(
        sandbox_id=spec.lease_id,
        state=SandboxState.RUNNING,
        labels=spec.labels.as_dict(),
        created_at=now,
        expires_at=now + timedelta(seconds=math.ceil(spec.lifetime_seconds))
        if spec.lifetime_seconds
        else None,
    )


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except ValueError:
        return None
