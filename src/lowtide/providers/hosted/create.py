"""A create call: what it may be asked for, and what it made when its answer was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from lowtide import errors, logger
from lowtide.backoff import backoff
from lowtide.providers.base import LABEL_PREFIX, Labels, SandboxInfo, SandboxSpec
from lowtide.providers.hosted.access import is_id
from lowtide.providers.hosted.service import Service, was_lost
from lowtide.providers.network.policy import Policy

Options = TypeVar("Options")

_AGAIN_SECONDS = 5.0
"""With less time than this left, a create is not sent again."""
_SHOWN_SECONDS = 2.0
"""How long a sandbox may take to show by its id after its create was answered."""


async def recovered(
    make: Callable[[float], Awaitable[SandboxInfo]],
    find: Callable[[], Awaitable[SandboxInfo | None]],
    read: Callable[[str], Awaitable[SandboxInfo]],
    *,
    service: Service,
    labels: Labels,
    seconds: float,
    replay: bool = False,
    lost: Callable[[errors.LowtideError], bool] = was_lost,
) -> SandboxInfo:
    """Create a sandbox within `seconds` and return it once its labels prove that it is this lease's own.

    `make` sends one create request that may take that many seconds, and returns what the answer says: its
    labels are empty where the service's answer has none. `read` gets a sandbox by id: it is used only for such
    an answer. `find` looks for the lease's sandbox by name or label. `replay`: the same request may be sent
    again, because the service recognises it by its key or name. `lost`: whether an error leaves open what was
    created.

    A lost, unreadable or wrong answer (it names a sandbox of another lease, or no sandbox) is treated alike:
    find the sandbox, then replay the request. Raises SandboxUnavailableError when neither succeeds; the
    lifecycle then recovers the lease.
    """
    began = time.monotonic()

    async def attempt(left: float) -> SandboxInfo:
        """Raises LowtideError. One that `lost` denies is the service's refusal."""
        try:
            answer = await make(left)
        except errors.LowtideError:
            raise
        except Exception as error:
            raise service.unreadable("create", error) from error
        try:
            return await confirmed(answer, read, service=service, labels=labels)
        except errors.LowtideError as error:
            raise _Unconfirmed(error) from error

    try:
        return await attempt(seconds)
    except _Unconfirmed as unconfirmed:
        failure = unconfirmed.why
    except errors.LowtideError as error:
        if not lost(error):
            raise
        failure = error
    log = logger.get(f"lowtide.{service.provider}")
    log.info("lease %s: the answer to create cannot be used; looking for what it made", labels.lease_id)
    try:
        found = await find()
    except errors.LowtideError:
        raise failure from failure.__cause__
    if found is not None and not found.state.terminal:
        log.info("lease %s: found %s", labels.lease_id, found.sandbox_id)
        return found
    left = seconds - (time.monotonic() - began)
    if not replay or left < _AGAIN_SECONDS:
        raise failure from failure.__cause__
    try:
        return await attempt(left)
    except _Unconfirmed as unconfirmed:
        raise unconfirmed.why from unconfirmed.why.__cause__


class _Unconfirmed(Exception):
    """A create was answered, and the answer is not proven to be about the lease's own sandbox."""

    def __init__(self, why: errors.LowtideError) -> None:
        super().__init__(str(why))
        self.why = why


async def confirmed(
    answer: SandboxInfo,
    read: Callable[[str], Awaitable[SandboxInfo]],
    *,
    service: Service,
    labels: Labels,
) -> SandboxInfo:
    """The answer to a create, with the labels that prove it. Costs one `read` where the answer has no labels.

    Raises SandboxUnavailableError for an answer that names no sandbox, or one of another lease: using it
    would end that one with this lease, and leave what was created.
    """
    if not is_id(answer.sandbox_id):
        words = f"{service.name} answered a create without naming a sandbox"
        raise service.error(errors.SandboxUnavailableError, words)
    shown = answer.labels
    if Labels.from_dict(shown) is None:
        shown = (await _read(answer.sandbox_id, read, service)).labels
    if not is_of_lease(shown, labels):
        words = (
            f"{service.name} answered a create with {answer.sandbox_id}, which is not this lease's sandbox"
        )
        raise service.error(errors.SandboxUnavailableError, words)
    return replace(answer, labels=shown)


async def _read(
    sandbox_id: str, read: Callable[[str], Awaitable[SandboxInfo]], service: Service
) -> SandboxInfo:
    """What was just created may take a moment to show."""
    deadline = time.monotonic() + _SHOWN_SECONDS
    for delay in backoff(0.05, 0.5):
        try:
            return await read(sandbox_id)
        except errors.SandboxNotFoundError as error:
            if time.monotonic() + delay > deadline:
                raise service.elsewhere(sandbox_id) from error
        except errors.LowtideError as error:
            if not error.retryable or time.monotonic() + delay > deadline:
                raise
        await asyncio.sleep(delay)
    raise AssertionError  # `backoff` has no end


def is_of_lease(shown: Mapping[str, str], labels: Labels) -> bool:
    """Whether a sandbox with the labels `shown` was created for the lease with these `labels`."""
    found = Labels.from_dict(shown)
    return found is not None and (found.lease_id, found.ledger_id) == (labels.lease_id, labels.ledger_id)


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
