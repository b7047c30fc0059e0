"""What E2B is asked for when a sandbox is made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers.base import LABEL_PREFIX, NetworkMode, SandboxSpec
from lowtide.providers.e2b.options import E2BOptions
from lowtide.providers.network.policy import Policy

if TYPE_CHECKING:
    from e2b import AsyncSandbox

DEFAULT_LIFETIME = 300
WORKING_DIR = LABEL_PREFIX + "cwd"
USER = LABEL_PREFIX + "user"
_ANYWHERE = "0.0.0.0/0"


def arguments(spec: SandboxSpec, options: E2BOptions, template: str | None) -> dict[str, Any]:
    """What E2B is asked for. Raises ValidationError for what it could only refuse."""
    metadata = {str(key): str(value) for key, value in options.metadata.items()}
    reserved = next((key for key in metadata if key.startswith(LABEL_PREFIX)), None)
    if reserved is not None:
        raise errors.ValidationError(
            f"metadata {reserved!r} begins with {LABEL_PREFIX!r}, which is lowtide's own",
            argument="metadata",
            provider="e2b",
        )
    if spec.snapshot is not None and options.template is not None:
        raise errors.ValidationError(
            "a sandbox starts from a snapshot or from a template", argument="template", provider="e2b"
        )
    metadata.update(spec.labels.as_dict())
    if spec.working_dir is not None:
        metadata[WORKING_DIR] = spec.working_dir
    if options.user is not None:
        metadata[USER] = options.user
    asked: dict[str, Any] = {
        "template": spec.snapshot or options.template or template,
        "timeout": max(1, math.ceil(spec.lifetime_seconds or DEFAULT_LIFETIME)),
        "metadata": metadata,
        "envs": dict(spec.environment),
        **_network(spec, options),
    }
    if options.on_timeout == "pause":
        asked["lifecycle"] = {"on_timeout": "pause", "auto_resume": options.auto_resume}
    elif options.auto_resume:
        raise errors.ValidationError(
            'auto_resume needs on_timeout="pause"', argument="auto_resume", provider="e2b"
        )
    if options.volumes:
        asked["volume_mounts"] = dict(options.volumes)
    if options.mcp is not None:
        asked["mcp"] = dict(options.mcp)
    return asked


def options_of(spec: SandboxSpec) -> E2BOptions:
    if spec.options is None:
        return E2BOptions()
    if not isinstance(spec.options, E2BOptions):
        raise errors.ValidationError(
            f"options for e2b are E2BOptions, not {type(spec.options).__name__}", argument="provider_options"
        )
    return spec.options


def with_key(sdk: type[AsyncSandbox], key: str) -> dict[str, Any]:
    """The idempotency key, as an argument or, for an SDK that has none yet, as the header it becomes."""
    if "idempotency_key" in _arguments_of(sdk.create):
        return {"idempotency_key": key}
    return {"headers": {"Idempotency-Key": key}}


def _network(spec: SandboxSpec, options: E2BOptions) -> dict[str, Any]:
    if spec.network is None:
        return {"network": dict(options.network)} if options.network is not None else {}
    if options.network is not None:
        raise errors.ValidationError(
            "network is given twice: as lowtide's and as E2B's own", argument="network", provider="e2b"
        )
    if spec.network.mode is NetworkMode.NONE:
        return {"allow_internet_access": False}
    if spec.network.mode is NetworkMode.ALLOW:
        _check_ranges(spec.network.allow)
        return {"network": {"allow_out": [*spec.network.allow], "deny_out": [_ANYWHERE]}}
    return {"allow_internet_access": True}


def _check_ranges(allow: tuple[str, ...]) -> None:
    for entry in Policy.of(allow).entries:
        if entry.range is not None and entry.range.version == 6:
            raise errors.UnsupportedError(
                f"E2B's allow-list takes IPv4 ranges and names, not {entry.text}",
                feature="network-allow of IPv6",
                alternative="the host's name, or the local provider",
                argument="network",
                provider="e2b",
            )


def _arguments_of(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__func__", function).__code__
    return tuple(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
