"""What `stop` and `rm` share: ending by id, in parallel, and telling what came of each."""

from __future__ import annotations

import sys
import time
from typing import Any

from lowtide.cli import exit_codes
from lowtide.cli.addressing import lease_named
from lowtide.cli.failures import exit_code, explain
from lowtide.cli.text import clean, print_json
from lowtide.defaults import default_provider
from lowtide.errors import LowtideError, SandboxNotFoundError
from lowtide.lifecycle.claim import Claim
from lowtide.lifecycle.lease import EndReport, LeaseState, Outcome
from lowtide.lifecycle.leases import lifecycle
from lowtide.operation import Operation
from lowtide.providers import registry


async def stop_one(text: str, provider: str | None, *, grace_seconds: float, snapshot: bool) -> EndReport:
    """End it as its owner would: the keep policy holds. One that is already kept is ended."""
    lease = await lease_named(text, provider, ended_too=True)
    if lease is None:
        return await remove_one(text, provider, missing_ok=False)
    place = registry.provider(lease.provider)
    return await lifecycle().end(
        place,
        lease.lease_id,
        grace_seconds=grace_seconds,
        snapshot_on_stop=snapshot,
        deadline_seconds=grace_seconds + 60.0,
        force=lease.state is LeaseState.KEPT,
        claim=Claim.ANY,
    )


async def remove_one(text: str, provider: str | None, *, missing_ok: bool) -> EndReport:
    """Destroy it. One that does not exist raises SandboxNotFoundError unless `missing_ok`."""
    started = time.monotonic()
    lease = await lease_named(text, provider, ended_too=True)
    place = registry.provider(lease.provider if lease else provider or default_provider())
    is_open = lease is not None and lease.state is not LeaseState.GONE
    if (
        lease is not None and is_open and lease.sandbox_id is None
    ):  # a create in flight, or one whose answer was lost
        return await lifecycle().end(place, lease.lease_id, grace_seconds=0.0, force=True, claim=Claim.ANY)
    sandbox_id = (lease.sandbox_id if lease else None) or text
    ended = await lifecycle().destroy(place, sandbox_id)
    if not ended and not missing_ok and not is_open:
        raise SandboxNotFoundError(
            f"{place.name} has no sandbox {text}", provider=place.name, sandbox_id=text
        )
    return EndReport(
        outcome=Outcome.DESTROYED if ended else Outcome.ALREADY_GONE,
        sandbox_id=sandbox_id,
        provider=place.name,
        seconds=time.monotonic() - started,
    )


def report_all(started: list[tuple[str, Operation[EndReport]]], *, as_json: bool) -> int:
    """Print one line or object each; the exit code is the worst of all."""
    worst, objects = exit_codes.OK, []
    for text, operation in started:
        try:
            report = operation.result()
            error = report.error if report.outcome is Outcome.FAILED else None
        except LowtideError as failure:
            report, error = None, failure
        line, code = "", exit_codes.OK
        if error is not None:
            line, code = explain(error)
            code = exit_code(error) if isinstance(error, LowtideError) else code
        worst = max(worst, code)
        if as_json:
            objects.append(_as_dict(text, report, line))
        elif error is not None:
            print(f"lowtide: {line}", file=sys.stderr)
        elif report is not None:
            snapshot = f", snapshot {report.snapshot_id}" if report.snapshot_id else ""
            why = f" ({report.why})" if report.outcome is Outcome.KEPT and report.why else ""
            print(
                clean(f"{report.sandbox_id or text} {str(report.outcome).replace('_', ' ')}{why}{snapshot}")
            )
    if as_json:
        print_json(objects)
    return worst


def _as_dict(text: str, report: EndReport | None, error: str) -> dict[str, Any]:
    return {
        "id": (report.sandbox_id if report else None) or text,
        "provider": report.provider if report else None,
        "outcome": str(report.outcome if report else Outcome.FAILED),
        "why": report.why if report else error,
        "seconds": round(report.seconds, 3) if report else None,
        "snapshot_id": report.snapshot_id if report else None,
        "error": error or None,
    }
