"""What a create call may ask for: each field checked, with what the service sets where nothing is said."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from cwsandbox._proto import sandbox_pb2 as pb

from lowtide.emulators.backing import allowed
from lowtide.emulators.coreweave.refusal import Code, Refused, invalid, not_there
from lowtide.providers.base import Limits

if TYPE_CHECKING:
    from lowtide.emulators.coreweave.volumes import Volumes

RUNNER, RUNNER_GROUP = "lowtide-runner-1", "lowtide-runners"
RUNTIME_CLASS = "lowtide-local"
DEFAULT_LIFETIME_SECONDS = 600
LONGEST_LIFETIME_SECONDS = 30 * 86_400

_TAG = re.compile(r"[A-Za-z0-9._-]*[A-Za-z0-9]")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]([A-Za-z0-9._-]{0,252})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")
_UNITS = {"m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4, "Pi": 1024**5}
_RUNTIME_CLASSES = ("", RUNTIME_CLASS, "gvisor")


def checked(given: Any, volumes: Volumes, snapshots: Collection[str]) -> Any:
    """A copy of the spec with its defaults. Raises `Refused`."""
    spec = pb.SandboxSpec()
    spec.CopyFrom(given)
    check_tags(spec.tags)
    spec.tags[:] = dict.fromkeys(spec.tags)
    if not spec.containers:
        raise invalid("sandbox.spec.containers", "at least one container is needed")
    if len(spec.containers) > 1:
        raise not_there("more than one container in a sandbox")
    if not 0 <= spec.max_lifetime_seconds <= LONGEST_LIFETIME_SECONDS:
        raise invalid("sandbox.spec.max_lifetime_seconds", f"must be from 0 to {LONGEST_LIFETIME_SECONDS}")
    spec.max_lifetime_seconds = spec.max_lifetime_seconds or DEFAULT_LIFETIME_SECONDS
    if spec.mode == pb.SANDBOX_MODE_SERVERLESS and spec.runner_ids:
        raise invalid("sandbox.spec.runner_ids", "only with the mode CKS")
    for runner in spec.runner_ids:
        if runner != RUNNER:
            raise Refused(Code.NOT_FOUND, f"no runner {runner}", "CWSANDBOX_RUNNER_NOT_FOUND")
    if spec.runtime_class not in _RUNTIME_CLASSES:
        raise Refused(
            Code.FAILED_PRECONDITION,
            f"no runner has the runtime class {spec.runtime_class}",
            "CWSANDBOX_PLACEMENT_CONSTRAINT_UNSATISFIED",
        )
    named = _check_volumes(spec, volumes, snapshots)
    _check_container(spec.containers[0], named)
    _check_services(spec)
    _check_egress(spec.network)
    return spec


def limits(container: Any) -> Limits:
    """What holds for it, of what it was given."""
    given = container.resource_requirements.limits
    memory = _amount(given.memory or container.resources.memory)
    cpu = _amount(given.cpu or container.resources.cpu)
    return Limits(cpu=cpu or None, memory_bytes=int(memory) or None)


def _amount(quantity: str) -> float:
    number = quantity.rstrip("mkKMGTPi")
    return float(number or 0) * _UNITS.get(quantity[len(number) :], 1)


def ways_out(network: Any) -> tuple[str, ...] | None:
    """The allow-list that its rules come to, with nothing in it where all is denied; None where nothing is said, or all is open."""
    if network.deny_egress:
        return ()
    entries = []
    for rule in network.egress:
        kind = rule.WhichOneof("destination")
        if kind == "any":
            return None
        if kind == "https_hostname":
            entries.append(f"{rule.https_hostname}:443")
        elif kind == "cidr":
            ports = [f":{p.port}" for p in rule.ports] or [""]
            entries += [f"{rule.cidr.cidr}{port}" for port in ports]
    return allowed(entries) if network.egress else None


def check_tags(tags: Collection[str]) -> None:
    for tag in tags:
        if len(tag) > 59 or not _TAG.fullmatch(tag):
            raise invalid(
                "sandbox.spec.tags",
                "a tag has at most 59 of A-Z a-z 0-9 . _ - and ends with a letter or digit",
            )
    if len(tags) > 100:
        raise invalid("sandbox.spec.tags", "more than 100")


def check_environment(environment: Any, field: str) -> None:
    for name in environment:
        if not _VARIABLE.fullmatch(name):
            raise invalid(field, f"{name!r} is not the name of a variable")


def check_command(words: Collection[str], field: str) -> None:
    if not words or not next(iter(words)):
        raise invalid(field, "is required")
    if sum(map(len, words)) > 1 << 20:
        raise invalid(field, "is longer than 1 MiB")


def _check_container(container: Any, volumes: Collection[str]) -> None:
    where = "sandbox.spec.containers[0]"
    container.name = container.name or "main"
    if not _NAME.fullmatch(container.name):
        raise invalid(f"{where}.name", "lower-case letters, digits and -, at most 63")
    if not container.image:
        raise invalid(f"{where}.image", "is required")
    if container.args and not container.command:
        raise invalid(f"{where}.args", "only with a command")
    check_environment(container.environment_variables, f"{where}.environment_variables")
    if container.working_dir and not container.working_dir.startswith("/"):
        raise invalid(f"{where}.working_dir", "must be absolute")
    for file in container.files:
        check_path(file.path, f"{where}.files.path")
    for mount in container.volume_mounts:
        check_path(mount.mount_path, f"{where}.volume_mounts.mount_path")
        if mount.volume not in volumes:
            raise invalid(f"{where}.volume_mounts.volume", f"no volume {mount.volume!r} in this spec")
        if mount.sub_path.startswith("/") or ".." in mount.sub_path.split("/"):
            raise invalid(f"{where}.volume_mounts.sub_path", "must stay inside the volume")
    if container.secret_stores:
        raise Refused(
            Code.NOT_FOUND,
            f"no secret store {container.secret_stores[0].store_name!r}",
            "CWSANDBOX_SECRET_STORE_NOT_FOUND",
        )
    need = container.resource_requirements
    for part in (container.resources, need.requests, need.limits):
        for quantity in (part.cpu, part.memory):
            if quantity and not _QUANTITY.fullmatch(quantity):
                raise invalid(f"{where}.resources", f"{quantity!r} is not a quantity")


def check_path(path: str, field: str) -> None:
    if not path.startswith("/") or path.endswith("/") or "/../" in f"{path}/":
        raise invalid(field, "must be an absolute path of a file or directory")
    if len(path) > 4000:
        raise invalid(field, "is too long")


def _check_volumes(spec: Any, volumes: Volumes, snapshots: Collection[str]) -> list[str]:
    named: list[str] = []
    for volume in spec.volumes:
        if not _NAME.fullmatch(volume.name):
            raise invalid("sandbox.spec.volumes.name", "lower-case letters, digits and -, at most 63")
        if volume.name in named:
            raise invalid("sandbox.spec.volumes.name", "the same name twice")
        named.append(volume.name)
        if volume.volume_id:
            volumes.get(volume.volume_id)
        size = volume.scratch.size
        if size and not _QUANTITY.fullmatch(size):
            raise invalid("sandbox.spec.volumes.scratch.size", f"{size!r} is not a quantity")
        restored = volume.scratch.restore_from_snapshot_id
        if restored and restored not in snapshots:
            raise Refused(Code.NOT_FOUND, f"no snapshot {restored}", "CWSANDBOX_FSS_NOT_FOUND")
    return named


def _check_egress(network: Any) -> None:
    where = "sandbox.spec.network.egress"
    for rule in network.egress:
        kind = rule.WhichOneof("destination")
        if kind is None:
            raise invalid(where, "a rule has a destination")
        if kind == "https_hostname" and not _HOST.fullmatch(rule.https_hostname):
            raise invalid(f"{where}.https_hostname", "is no name of a host")
        if kind == "cidr":
            try:
                ipaddress.ip_network(rule.cidr.cidr, strict=False)
            except ValueError:
                raise invalid(f"{where}.cidr", "is no range of addresses") from None
        for ports in rule.ports:
            if not 1 <= ports.port <= 65_535 or not 0 <= ports.end_port <= 65_535:
                raise invalid(f"{where}.ports", "must be from 1 to 65535")


def _check_services(spec: Any) -> None:
    seen: set[int] = set()
    visibilities = {service.visibility for service in spec.services}
    if pb.VISIBILITY_PUBLIC in visibilities and pb.VISIBILITY_PRIVATE in visibilities:
        raise not_there("public and private services in one sandbox")
    for service in spec.services:
        if not 1 <= service.port <= 65_535:
            raise invalid("sandbox.spec.services.port", "must be from 1 to 65535")
        if service.port in seen:
            raise invalid("sandbox.spec.services.port", "the same port twice")
        seen.add(service.port)
        if service.name and not _NAME.fullmatch(service.name):
            raise invalid("sandbox.spec.services.name", "lower-case letters, digits and -, at most 63")
        if service.endpoint.kind == pb.ENDPOINT_KIND_TLS_PASSTHROUGH:
            raise Refused(
                Code.FAILED_PRECONDITION,
                "no runner takes TLS passthrough endpoints",
                "CWSANDBOX_TLS_PASSTHROUGH_ENDPOINTS_NOT_SUPPORTED",
            )
