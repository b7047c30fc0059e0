"""What CoreWeave is asked for when a sandbox is made: our program as its main process, with identity and end."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from lowtide import errors
from lowtide.providers.base import LABEL_PREFIX, NetworkMode, SandboxSpec
from lowtide.providers.coreweave.access import PROVIDER, Access, messages
from lowtide.providers.coreweave.errors import SERVICE
from lowtide.providers.coreweave.options import CoreWeaveOptions
from lowtide.providers.hosted import options_of
from lowtide.providers.inside import program
from lowtide.providers.network.policy import Policy

DEFAULT_IMAGE = "python:3.11"
LIFETIME_SECONDS = 86_400
"""The fixed end of one that nobody gave a lifetime: a day. The short one is kept inside, and renewed."""
LONGEST_SECONDS = 30 * 86_400
"""The longest lifetime that CoreWeave documents. Nothing extends it."""
PLACE = '"${TMPDIR:-/tmp}/.lowtide-inside"'
_TOMBSTONE_SECONDS = 60
_TAG = LABEL_PREFIX + "tag-"


def request(spec: SandboxSpec, access: Access) -> Any:
    """The whole create call. Raises ValidationError for what CoreWeave could only refuse."""
    import cwsandbox

    with suppress(RuntimeError):  # the program uses cwsandbox itself, and has its handlers already
        cwsandbox.disable_signal_handlers()
    given = options_of(spec, CoreWeaveOptions, PROVIDER)
    end = fixed_end(spec)
    lease = min(end, max(1, math.ceil(spec.lifetime_seconds))) if spec.lifetime_seconds else end
    keywords = given.keywords()
    _put(keywords, "resources", _resources(spec))
    _put(keywords, "network", _network(spec))
    _put(keywords, "runtime_class", spec.isolation.value if spec.isolation is not None else None)
    if spec.snapshot is not None:
        keywords["file_system_snapshot"] = _restored(spec.snapshot, given.file_system_snapshot)
    try:
        handle = cwsandbox.Sandbox(
            container_image=spec.image or access.image or DEFAULT_IMAGE,
            command="/bin/sh",
            # `guard`: an exec has no user of its own here, so the program keeps a capability from its commands.
            args=["-c", _start_line(), "lowtide", str(lease), str(end), *(spec.command or ())],
            working_dir=spec.working_dir,
            environment_variables={
                **spec.environment,
                program.KEY: access.inside_key(spec.lease_id).hex(),
            },
            tags=tags_of(spec.labels.as_dict()),
            max_lifetime_seconds=end,
            base_url=access.base_url,
            **keywords,
        )
        # Nothing public builds the request without sending it, and the one that sends it picks its own id.
        return handle._build_create_request(
            request_id=request_id(spec), start_kwargs=dict(handle._start_kwargs)
        )
    except errors.LowtideError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, cwsandbox.CWSandboxError) as error:
        raise _wrong("provider_options", f"cwsandbox does not take these options: {error}") from error


def _wrong(argument: str, words: str) -> errors.ValidationError:
    return SERVICE.error(errors.ValidationError, words, argument=argument)


def tombstone(spec: SandboxSpec, access: Access) -> Any:
    """The smallest request under the same id: it finds the first one, or takes its place and ends at once."""
    pb = messages()
    container = pb.Container(
        name="main", image=access.image or DEFAULT_IMAGE, command="/bin/sh", args=["-c", "exit 0"]
    )
    made = pb.SandboxSpec(
        containers=[container],
        tags=tags_of(spec.labels.as_dict()),
        max_lifetime_seconds=_TOMBSTONE_SECONDS,
    )
    return pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=made), request_id=request_id(spec))


def lease_tags(spec: SandboxSpec) -> list[str]:
    """Those that nothing else has but what is made for this lease."""
    return tags_of({"lowtide-lease": spec.lease_id, "lowtide-ledger": spec.labels.ledger_id})


def request_id(spec: SandboxSpec) -> str:
    """The lease, in the form that the service's own clients use."""
    digest = hashlib.sha256(f"lowtide {spec.labels.ledger_id} {spec.lease_id}".encode()).digest()
    return str(uuid.UUID(bytes=digest[:16], version=4))


def fixed_end(spec: SandboxSpec) -> int:
    """The seconds after which CoreWeave destroys the sandbox. Raises ValidationError for more than CoreWeave allows."""
    # A difference of two times of the day: a little off.
    end = max(1, math.ceil((spec.fixed_lifetime_seconds or LIFETIME_SECONDS) - 0.001))
    if end > LONGEST_SECONDS:
        words = f"CoreWeave ends every sandbox after 30 days: set max_lifetime_seconds to {LONGEST_SECONDS} or less"
        raise _wrong("max_lifetime_seconds", words)
    return end


def tags_of(labels: Mapping[str, str]) -> list[str]:
    """People's tags as they are; lowtide's labels with a dot before the value. All within the service's rules."""
    tags = []
    for name, value in labels.items():
        tag = name.removeprefix(_TAG) if name.startswith(_TAG) else f"{name}.{value}"
        if name.startswith(_TAG) and tag.startswith(LABEL_PREFIX):
            raise _wrong("tags", f"the tag {tag!r} begins with {LABEL_PREFIX!r}, which is lowtide's own")
        tags.append(tag)
    return tags


def labels_of(tags: Any) -> dict[str, str]:
    """The reverse."""
    labels = {}
    for tag in tags:
        name, dot, value = tag.partition(".")
        if tag.startswith(LABEL_PREFIX) and dot:
            labels[name] = value
        else:
            labels[_TAG + tag] = "1"
    return labels


@cache
def _start_line() -> str:
    """Small: it is in every answer that shows a sandbox."""
    return program.main_line(PLACE, "x86_64", "aarch64", small=True)


def _put(keywords: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        return
    if name in keywords:
        raise _wrong(name, f"{name} is given twice: as lowtide's and as CoreWeave's own")
    keywords[name] = value


def _resources(spec: SandboxSpec) -> dict[str, Any] | None:
    limits = {}
    if spec.limits.cpu is not None:
        limits["cpu"] = f"{max(1, round(spec.limits.cpu * 1000))}m"
    if spec.limits.memory_bytes is not None:
        limits["memory"] = str(spec.limits.memory_bytes)
    return {"limits": limits} if limits else None


def _network(spec: SandboxSpec) -> dict[str, Any] | None:
    if spec.network is None:
        return None
    if spec.network.mode is NetworkMode.NONE:
        return {"deny_egress": True, "deny_ingress": True}
    if spec.network.mode is NetworkMode.INTERNET:
        return {"egress": [{"any": True}]}
    return {"egress": [_rule(entry) for entry in Policy.of(spec.network.allow).entries]}


def _rule(entry: Any) -> dict[str, Any]:
    if entry.range is not None:
        rule: dict[str, Any] = {"cidr": str(entry.range)}
        return {**rule, "ports": [entry.port]} if entry.port is not None else rule
    if entry.port not in (None, 443):
        raise SERVICE.error(
            errors.UnsupportedError,
            f"CoreWeave's allow-list opens port 443 of a name, not {entry.text}",
            feature="network-ports of a name",
            alternative="the host's address with that port, or the local provider",
            argument="network",
        )
    return {"dns_name": f"*.{entry.name}" if entry.below else entry.name}


def _restored(snapshot: str, volume: Any) -> dict[str, Any]:
    import dataclasses

    if volume is None:
        where = 'provider_options={"file_system_snapshot": {"mount_path": "/workspace"}}'
        raise _wrong("snapshot", f"a snapshot of CoreWeave holds one volume: say where it goes with {where}")
    known = dict(volume) if isinstance(volume, Mapping) else dataclasses.asdict(volume)
    return {**known, "file_system_snapshot_id": snapshot}
