"""What a create call of a devbox may hold: its fields and their types."""

from __future__ import annotations

import os
from typing import Any

from lowtide.emulators.fields import (
    FLAG,
    LIST_OF_OBJECTS,
    LIST_OF_TEXT,
    OBJECT,
    TEXT,
    TEXTS,
    check_fields,
    whole,
)
from lowtide.emulators.runloop.model import (
    DEFAULT_KEEP_ALIVE_SECONDS,
    LONGEST_KEEP_ALIVE_SECONDS,
    Refused,
    Tunnel,
    new_id,
)

_NEW = {
    **dict.fromkeys(
        ("blueprint_id", "blueprint_name", "snapshot_id", "name", "entrypoint", "repo_connection_id"), TEXT
    ),
    **dict.fromkeys(("metadata", "environment_variables", "secrets", "file_mounts"), TEXTS),
    **dict.fromkeys(("launch_parameters", "tunnel", "gateways", "mcp"), OBJECT),
    **dict.fromkeys(("code_mounts", "mounts"), LIST_OF_OBJECTS),
}
_LAUNCH = {
    "keep_alive_time_seconds": whole(1, LONGEST_KEEP_ALIVE_SECONDS),
    "resource_size_request": TEXT,
    "launch_commands": LIST_OF_TEXT,
    "architecture": TEXT,
    "network_policy_id": TEXT,
    "after_idle": OBJECT,
    "lifecycle": OBJECT,
    "user_parameters": OBJECT,
}
_USER = {"username": TEXT, "uid": whole(0, 2**31)}
_USERS = ("user", "root")  # what the machine behind it has
_IDLE = {"idle_time_seconds": whole(1, LONGEST_KEEP_ALIVE_SECONDS), "on_idle": TEXT}
_SIZES = ("X_SMALL", "SMALL", "MEDIUM", "LARGE", "X_LARGE", "XX_LARGE", "CUSTOM_SIZE")


def launch_parameters(asked: dict[str, Any]) -> dict[str, Any]:
    """Those of a create call, checked, with what the service sets where nothing is said."""
    check_fields(asked, _NEW)
    chosen = [key for key in ("blueprint_id", "blueprint_name", "snapshot_id") if asked.get(key)]
    if len(chosen) > 1:
        raise Refused(400, f"only one of {', '.join(chosen)} can be given")
    for mount in asked.get("mounts") or ():
        if mount.get("type") == "object_mount":
            check_fields(
                mount, {"object_id": TEXT, "object_path": TEXT}, required=("object_id", "object_path")
            )
    launch = dict(asked.get("launch_parameters") or {})
    check_fields(launch, _LAUNCH)
    if launch.get("resource_size_request") not in (None, *_SIZES):
        raise Refused(400, f"resource_size_request must be one of {', '.join(_SIZES)}")
    if launch.get("architecture") not in (None, "x86_64", "arm64"):
        raise Refused(400, "architecture must be x86_64 or arm64")
    if user := launch.get("user_parameters"):
        check_fields(user, _USER, required=("username", "uid"))
        if user["username"] not in _USERS:
            raise Refused(400, f"user_parameters.username: this emulator knows {' and '.join(_USERS)}")
    lifecycle = launch.get("lifecycle") or {}
    check_fields(lifecycle, {"after_idle": OBJECT, "resume_triggers": OBJECT, "lifecycle_hooks": OBJECT})
    for idle in (launch.get("after_idle"), lifecycle.get("after_idle")):
        if idle is not None:
            check_fields(idle, _IDLE, required=("idle_time_seconds", "on_idle"))
            if idle["on_idle"] not in ("shutdown", "suspend"):
                raise Refused(400, "on_idle must be shutdown or suspend")
    launch.setdefault("keep_alive_time_seconds", DEFAULT_KEEP_ALIVE_SECONDS)
    # Sandboxes of this machine have its architecture, whatever is asked for.
    launch["architecture"] = "arm64" if os.uname().machine == "aarch64" else "x86_64"
    return launch


def new_tunnel(asked: dict[str, Any], now: float) -> Tunnel:
    """From what a create call or `enable_tunnel` says of it."""
    check_fields(asked, {"auth_mode": TEXT, "http_keep_alive": FLAG, "wake_on_http": FLAG})
    mode = asked.get("auth_mode") or "open"
    if mode not in ("open", "authenticated"):
        raise Refused(400, "auth_mode must be open or authenticated")
    return Tunnel(
        key=new_id("tnl").partition("_")[2],
        auth_mode=mode,
        token=new_id("tok") if mode == "authenticated" else None,
        created_at=now,
        http_keep_alive=bool(asked.get("http_keep_alive")),
        wake_on_http=bool(asked.get("wake_on_http")),
    )
