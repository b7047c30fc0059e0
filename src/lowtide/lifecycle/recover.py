"""Finding what a lease has at its provider, when the answer that named it was lost or the key is another one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lowtide import logger
from lowtide.errors import AuthenticationError, LedgerError, LowtideError, RateLimitError
from lowtide.lifecycle.clock import Instant
from lowtide.lifecycle.crash_points import point
from lowtide.lifecycle.lease import Lease
from lowtide.lifecycle.ledger import Ledger
from lowtide.providers.base import Labels, Provider, SandboxSpec
from lowtide.providers.optional import Replays

log = logger.get("lowtide.lifecycle")

T = TypeVar("T")


def remembered(provider: Provider, spec: SandboxSpec) -> dict[str, Any]:
    """What of the create call goes into the row, for whoever has to find what it made."""
    options = {name: getattr(spec.options, name, None) for name in provider.traits.recovery_options}
    options = {name: value for name, value in options.items() if value is not None}
    known = {"image": spec.image, "snapshot": spec.snapshot, "options": options or None}
    return {name: value for name, value in known.items() if value is not None}


def recovery_spec(provider: Provider, lease: Lease) -> SandboxSpec:
    """Enough of the create call to find what it made; for a replaying provider also to replay it."""
    known = dict(lease.recovery)
    options = known.get("options")
    return SandboxSpec(
        labels=lease.labels,
        image=known.get("image"),
        snapshot=known.get("snapshot"),
        lifetime_seconds=lease.lifetime_seconds,
        options=provider.options_type(**options) if options and provider.options_type is not None else None,
    )


def request_ended(lease: Lease) -> dict[str, Instant]:
    """For a create whose answer is not known: when its request ended, or that it has by now."""
    if lease.sandbox_id is not None:
        return {}
    known = lease.request_ended
    return {"request_ended": known if known is not None and known.elapsed() is not None else Instant.now()}


async def recover(
    ledger: Ledger,
    provider: Provider,
    lease: Lease,
    spec: SandboxSpec,
    *,
    answered: bool,
    on_nothing: Callable[[], None] = lambda: None,
) -> str | None:
    """The id of what a create without a usable answer made; None once it has surely made nothing.

    What was asked for may appear for as long as the create window after the request has ended, unless the
    provider can take the request's key: then it shows at once, or cannot appear at all.

    `answered`: the create was refused. A refusal proves nothing by itself, because a proxy may give it after the
    service has committed. With one empty look it is proof where that look cannot lag (`Recovery.looks_lag`);
    elsewhere the window is waited for, with few looks. `on_nothing` is called after each empty look.
    """
    delay, factor, longest = (1.0, 3.0, 30.0) if answered else (0.05, 1.6, 5.0)
    ended = request_ended(lease).get("request_ended") or Instant.now()
    while True:
        found = await patiently(f"looking for {lease.lease_id}", lambda: provider.find(spec))
        if found is None and isinstance(provider, Replays):
            point("recover:replay")
            found = await patiently(f"replaying {lease.lease_id}", lambda: provider.replay(spec))
            point("recover:replayed")
        if found is not None:
            try:
                await ledger.note(
                    lease.lease_id, f"found {found.sandbox_id} again", sandbox_id=found.sandbox_id
                )
            except LedgerError as error:  # it is known here, and that is enough to end it
                log.warning("lease %s: %s", lease.lease_id, error)
            return found.sandbox_id
        on_nothing()
        if answered and not provider.traits.recovery.looks_lag:
            return None
        left = create_window_seconds(provider) - (ended.elapsed() or 0.0)
        if left <= 0:
            return None
        await asyncio.sleep(min(delay, left + 0.01))
        delay = min(delay * factor, longest)


def create_window_seconds(provider: Provider) -> float:
    """The provider's own, or LOWTIDE_CREATE_WINDOW_SECONDS where that is shorter: for tests on one machine."""
    window = provider.traits.create_window_seconds
    try:
        return min(window, float(os.environ["LOWTIDE_CREATE_WINDOW_SECONDS"]))
    except (KeyError, ValueError):
        return window


async def is_shown(provider: Provider, lease: Lease, spec: SandboxSpec | None = None) -> bool:
    """Whether the account at hand is the lease's, although its key may have been exchanged meanwhile.

    The same fingerprint is. With another one the proof is the sandbox itself: it shows there, with the
    lease's own labels. That it does not show proves nothing, so then nothing is settled.
    """
    if provider.account == lease.account:
        return True
    shown = await patiently(
        f"looking for {lease.lease_id} with another key",
        lambda: provider.find(spec or recovery_spec(provider, lease)),
    )
    labels = Labels.from_dict(shown.labels) if shown is not None else None
    return labels is not None and (labels.lease_id, labels.ledger_id) == (lease.lease_id, lease.ledger_id)


def another_account(provider: Provider, lease: Lease) -> AuthenticationError:
    return AuthenticationError(
        f"{lease.sandbox_id or lease.lease_id} was made with another {provider.name} key, and the one at hand does not "
        "show it: it has ended, or belongs to another account. Set the key it was made with and run: lowtide sweep",
        provider=provider.name,
        sandbox_id=lease.sandbox_id,
    )


async def patiently(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Call it, again while the fault may pass. The caller's deadline bounds it."""
    delay = 0.1
    while True:
        try:
            return await call()
        except LowtideError as error:
            if not error.retryable:
                raise
            wait = delay
            if isinstance(error, RateLimitError) and error.retry_after_seconds is not None:
                wait = max(delay, error.retry_after_seconds)
            log.info("%s: %s; trying again in %.1f s", what, error, wait)
        await asyncio.sleep(wait)
        delay = min(delay * 2, 5.0)
