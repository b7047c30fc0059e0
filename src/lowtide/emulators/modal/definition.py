"""What a create call may ask for: each field checked, and what is not there refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from modal_proto import api_pb2 as pb

from lowtide.emulators.modal.account import NAME, check_variables
from lowtide.emulators.modal.refusal import invalid, not_there

LONGEST_SECONDS = 86_400
_MOST_TAGS = 100
_NOT_THERE = {
    "mount_ids": "mounts of local files",
    "nfs_mounts": "network file systems",
    "s3_mounts": "cloud buckets",
    "cloud_bucket_mounts": "cloud buckets",
    "volume_mounts": "volumes",
    "proxy_id": "proxies",
    "custom_domain": "custom domains",
    "enable_snapshot": "memory snapshots",
    "i6pn_enabled": "networks between sandboxes",
}


def checked(given: Any) -> Any:
    """A copy with its defaults. Raises `Refused`."""
    wanted = pb.Sandbox()
    wanted.CopyFrom(given)
    for name, feature in _NOT_THERE.items():
        if getattr(wanted, name, None):
            raise not_there(feature)
    if wanted.resources.gpu_config.count or wanted.resources.gpu_config.gpu_type:
        raise not_there("GPUs")
    if wanted.HasField("name") and not NAME.fullmatch(wanted.name):
        raise invalid("definition.name", "letters, digits, . _ -, at most 63")
    if not 1 <= wanted.timeout_secs <= LONGEST_SECONDS:
        raise invalid("definition.timeout_secs", f"must be from 1 to {LONGEST_SECONDS}")
    if wanted.idle_timeout_secs > LONGEST_SECONDS:
        raise invalid("definition.idle_timeout_secs", f"must be at most {LONGEST_SECONDS}")
    if wanted.workdir and not wanted.workdir.startswith("/"):
        raise invalid("definition.workdir", "must be absolute")
    if wanted.entrypoint_args and not wanted.entrypoint_args[0]:
        raise invalid("definition.entrypoint_args", "names no program")
    if sum(len(word.encode()) for word in wanted.entrypoint_args) > 1 << 16:
        raise invalid("definition.entrypoint_args", f"longer than {1 << 16} bytes together")
    check_variables(wanted.environment_variables.contents, "definition.environment_variables")
    seen: set[int] = set()
    for one in wanted.open_ports.ports:
        if not 1 <= one.port <= 65_535 or one.port in seen:
            raise invalid("definition.open_ports", "from 1 to 65535, each once")
        seen.add(one.port)
    if len(seen) > 20:
        raise invalid("definition.open_ports", "more than 20")
    probe = wanted.readiness_probe
    if wanted.HasField("readiness_probe"):
        if probe.WhichOneof("probe_oneof") is None:
            raise invalid("definition.readiness_probe", "tcp_port or exec_command")
        if probe.WhichOneof("probe_oneof") == "tcp_port" and not 1 <= probe.tcp_port <= 65_535:
            raise invalid("definition.readiness_probe.tcp_port", "from 1 to 65535")
        if probe.WhichOneof("probe_oneof") == "exec_command" and not probe.exec_command.argv:
            raise invalid("definition.readiness_probe.exec_command", "is empty")
    return wanted


def checked_tags(given: Iterable[Any]) -> dict[str, str]:
    tags = {one.tag_name: one.tag_value for one in given}
    if len(tags) > _MOST_TAGS:
        raise invalid("tags", f"more than {_MOST_TAGS}")
    for name, value in tags.items():
        if not 1 <= len(name) <= 256 or len(value) > 256:
            raise invalid("tags", "a name has from 1 to 256 characters, a value at most 256")
    return tags


def check_image(request: Any) -> None:
    image = request.image
    if image.build_function.definition or image.build_function_def:
        raise not_there("run_function in an image")
    if image.context_mount_id:
        raise not_there("local files in an image")
    if sum(map(len, image.dockerfile_commands)) > 1 << 20:
        raise invalid("image.dockerfile_commands", "longer than 1 MiB")
