"""A create call: what it may be asked for, and what it made when its answer was lost."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from lowtide import errors, logger
from lowtide.providers.base import LABEL_PREFIX, SandboxInfo, SandboxSpec
from lowtide.providers.hosted.service import Service, was_lost
from lowtide.providers.network.policy import Policy

Options = TypeVar("Options")

_AGAIN_SECONDS = 5.0
"""With less time than this left, a create is not sent again."""


async def recovered(
    make: Callable[[float], Awaitable[SandboxInfo]],
    find: Callable[[], Awaitable[SandboxInfo | None]],
    *,
    service: Service,
    lease_id: str,
    seconds: float,
    replay: bool = False,
    lost: Callable[[errors.LowtideError], bool] = was_lost,
) -> SandboxInfo:
    """What `make` made within `seconds`, also when its answer was lost.

    `make` sends one create that may take so many seconds; `find` looks by what the lease gave it (name, label,
    key). `replay`: the same request may be sent again, because the service knows it by its key or name.
    `lost`: whether an error leaves open what was made. What is found neither now nor by a replay is left
    to the lease: its window, the guardian and the provider's own clock.
    """
    began = time.monotonic()
    try:
        return await make(seconds)
    except errors.LowtideError as error:
        if not lost(error):
            raise
        log = logger.get(f"lowtide.{service.provider}")
        log.info("lease %s: the answer to create was lost; looking for what it made", lease_id)
        try:
            found = await find()
        except errors.LowtideError:
            raise error from error.__cause__
        if found is not None and not found.state.terminal:
            log.info("lease %s: found %s", lease_id, found.sandbox_id)
            return found
        left = seconds - (time.monotonic() - began)
        if not replay or left < _AGAIN_SECONDS:
            raise
        return await make(left)


def options_of(spec: SandboxSpec, kind: type[Options], provider: str) -> Options:
    """The provider's own options, or its defaults. ValidationError for those of another one."""
    if spec.options is None:
        return kind()
    if not isinstance(spec.options, kind):
        raise errors.ValidationError(
            f"options for {provider} are {kind.__name__}, not {type(spec.options).__name__}",
            argument="provider_options",
            provider=provider,
        )
    return spec.options


def asked_for(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a request, without what nobody asked for: None, or nothing in it. That is the service's to choose."""
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


def labels_of(
    spec: SandboxSpec, more: Mapping[str, str], provider: str, *, argument: str = "labels"
) -> dict[str, str]:
    """The lease's labels and the user's own beside them, whose names must not be lowtide's."""
    labels = {str(key): str(value) for key, value in more.items()}
    reserved = next((key for key in labels if key.startswith(LABEL_PREFIX)), None)
    if reserved is not None:
        raise errors.ValidationError(
            f"{argument}: {reserved!r} begins with {LABEL_PREFIX!r}, which is lowtide's own",
            argument=argument,
            provider=provider,
        )
    return {**labels, **spec.labels.as_dict()}


def only_ipv4(allow: tuple[str, ...], service: Service) -> tuple[list[str], list[str]]:
    """Ranges and names of an allow-list, for a service that takes no IPv6 range."""
    ranges, names = [], []
    for entry in Policy.of(allow).entries:
        if entry.range is None:
            names.append(entry.text)
        elif entry.range.version == 4:
            ranges.append(str(entry.range))
        else:
            raise errors.UnsupportedError(
                f"{service.name}'s allow-list takes IPv4 ranges and names, not {entry.text}",
                feature="network-allow of IPv6",
                alternative="the host's name, or the local provider",
                argument="network",
                provider=service.provider,
            )
    return ranges, names
