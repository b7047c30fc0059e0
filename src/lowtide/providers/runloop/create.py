"""What Runloop is asked for when a sandbox is made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import SandboxSpec
from lowtide.providers.runloop import lookup
from lowtide.providers.runloop.access import PROVIDER
from lowtide.providers.runloop.channel import WORKING_DIR
from lowtide.providers.runloop.errors import SERVICE, UNREACHED
from lowtide.providers.runloop.options import RunloopOptions, user_parameters

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

CREATE_SECONDS = 45.0
DEFAULT_LIFETIME = 300.0
TUNNEL = {"auth_mode": "authenticated"}


def arguments(spec: SandboxSpec, default_blueprint: str | None) -> dict[str, Any]:
    """Of the SDK's create. Raises ValidationError for what Runloop could only refuse."""
    options = hosted.options_of(spec, RunloopOptions, PROVIDER)
    metadata = hosted.labels_of(spec, options.metadata, PROVIDER, argument="metadata")
    if spec.working_dir is not None:
        metadata[WORKING_DIR] = spec.working_dir
    lives = max(math.ceil(spec.lifetime_seconds or DEFAULT_LIFETIME), options.keep_alive_seconds or 1)
    launch = {
        "keep_alive_time_seconds": lives,
        "resource_size_request": options.size,
        "launch_commands": list(options.launch_commands),
        "architecture": options.architecture,
        "network_policy_id": options.network_policy_id,
        "user_parameters": user_parameters(options.user) if options.user else None,
    }
    asked = {
        "name": spec.lease_id,
        "metadata": metadata,
        "environment_variables": dict(spec.environment),
        "launch_parameters": hosted.asked_for(launch),
        "secrets": dict(options.secrets),
        "tunnel": TUNNEL if spec.ports else None,
        **_start(spec, options, default_blueprint),
    }
    return hosted.asked_for(asked)


def _start(spec: SandboxSpec, options: RunloopOptions, default: str | None) -> dict[str, str | None]:
    named = options.blueprint or options.blueprint_id
    if spec.snapshot is not None and named is not None:
        words = "a sandbox starts from a snapshot or from a blueprint"
        raise SERVICE.error(errors.ValidationError, words, argument="blueprint")
    if spec.snapshot is not None:
        return {"snapshot_id": spec.snapshot}
    if options.blueprint_id is not None:
        return {"blueprint_id": options.blueprint_id}
    return {"blueprint_name": options.blueprint or default}


async def make(client: AsyncRunloop, asked: dict[str, Any], seconds: float) -> Any:
    """One request, with the lease's id as its own: where the service knows it, one that comes again makes nothing."""
    work = client.devboxes.create(**asked, idempotency_key=asked["name"], timeout=seconds)
    try:
        return lookup.checked(await SERVICE.call(seconds, work, "create"))
    except errors.SandboxUnavailableError as error:
        error.nothing_sent = hosted.was_raised_from(error, UNREACHED)
        raise
