"""A create: what E2B is asked for, and what it made."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import NetworkMode, SandboxInfo, SandboxSpec, SandboxState
from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.errors import SERVICE, was_lost
from lowtide.providers.e2b.options import E2BOptions
from lowtide.providers.e2b.sdk import USER, WORKING_DIR, LazySandbox, SdkSandbox

CREATE_SECONDS = 45.0
DEFAULT_LIFETIME = 300
_ANYWHERE = "0.0.0.0/0"


async def create(
    sdk: type[LazySandbox],
    access: Access,
    spec: SandboxSpec,
    asked: dict[str, Any],
    find: Callable[[], Awaitable[SandboxInfo | None]],
    read: Callable[[str], Awaitable[SandboxInfo]],
) -> tuple[SandboxInfo, SdkSandbox | None]:
    """The sandbox, and the SDK's object where the answer brought it. E2B's answer has no metadata: one read confirms it."""
    made: dict[str, SdkSandbox] = {}

    async def make(seconds: float) -> SandboxInfo:
        parameters = {**access.parameters(), **_with_key(sdk, spec.lease_id), "request_timeout": seconds}
        box = await SERVICE.call(seconds + 2.0, sdk.create(**asked, **parameters), "create")
        options = hosted.options_of(spec, E2BOptions, "e2b")
        # A snapshot may hold processes that run on in the new sandbox.
        made[box.sandbox_id] = SdkSandbox(
            box, spec.working_dir, options.user, untouched=spec.snapshot is None
        )
        now = datetime.now(UTC)
        return SandboxInfo(
            sandbox_id=box.sandbox_id,
            state=SandboxState.RUNNING,
            created_at=now,
            expires_at=now + timedelta(seconds=asked["timeout"]),
        )

    info = await hosted.recovered(
        make,
        find,
        read,
        service=SERVICE,
        labels=spec.labels,
        seconds=CREATE_SECONDS,
        replay=True,
        lost=was_lost,
    )
    return info, made.get(info.sandbox_id)


def arguments(spec: SandboxSpec, template: str | None) -> dict[str, Any]:
    """What E2B is asked for. Raises ValidationError for what it could only refuse."""
    options = hosted.options_of(spec, E2BOptions, "e2b")
    metadata = hosted.labels_of(spec, options.metadata, "e2b", argument="metadata")
    if spec.snapshot is not None and options.template is not None:
        raise _wrong("template", "a sandbox starts from a snapshot or from a template")
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
        raise _wrong("auto_resume", 'auto_resume needs on_timeout="pause"')
    if options.volumes:
        asked["volume_mounts"] = dict(options.volumes)
    if options.mcp is not None:
        asked["mcp"] = dict(options.mcp)
    return asked


def _with_key(sdk: type[LazySandbox], key: str) -> dict[str, Any]:
    """The idempotency key, as an argument or, for an SDK that has none yet, as the header it becomes."""
    code = getattr(sdk.create, "__func__", sdk.create).__code__
    if "idempotency_key" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return {"idempotency_key": key}
    return {"headers": {"Idempotency-Key": key}}


def _network(spec: SandboxSpec, options: E2BOptions) -> dict[str, Any]:
    if spec.network is None:
        return {"network": dict(options.network)} if options.network is not None else {}
    if options.network is not None:
        raise _wrong("network", "network is given twice: as lowtide's and as E2B's own")
    if spec.network.mode is NetworkMode.NONE:
        return {"allow_internet_access": False}
    if spec.network.mode is NetworkMode.ALLOW:
        hosted.only_ipv4(spec.network.allow, SERVICE)
        return {"network": {"allow_out": [*spec.network.allow], "deny_out": [_ANYWHERE]}}
    return {"allow_internet_access": True}


def _wrong(argument: str, words: str) -> errors.ValidationError:
    return SERVICE.error(errors.ValidationError, words, argument=argument)
