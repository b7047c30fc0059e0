"""What `lowtide sweep` asks the sweep for, and how its findings are told."""

from __future__ import annotations

from collections import Counter

from lowtide.cli import exit_codes
from lowtide.cli.text import duration, print_json, print_table
from lowtide.defaults import default_provider
from lowtide.engine import engine
from lowtide.errors import LowtideError
from lowtide.lifecycle.leases import lifecycle
from lowtide.lifecycle.sweep import Action, Finding, sweep
from lowtide.providers import registry
from lowtide.providers.base import Provider


def run_sweep(
    provider: str | None, *, tags: tuple[str, ...], older_than_seconds: float, dry_run: bool
) -> list[Finding]:
    """Sweep one provider, or the default and every one with open leases. One that cannot be reached is a finding."""
    ledger = lifecycle().ledger
    if provider is not None:
        places = {provider: registry.provider(provider)}
        unreachable: list[Finding] = []
    else:
        open_leases = engine().run(ledger.leases(tags=tags))
        names = dict.fromkeys([default_provider(), *(lease.provider for lease in open_leases)])
        places, unreachable = _connect(list(names))
    found = engine().run(
        sweep(ledger, places, tags=tags, older_than_seconds=older_than_seconds, dry_run=dry_run)
    )
    return found + unreachable


def _connect(names: list[str]) -> tuple[dict[str, Provider], list[Finding]]:
    places, unreachable = {}, []
    for name in names:
        try:
            places[name] = registry.provider(name)
        except LowtideError as error:
            unreachable.append(
                Finding(action=Action.FAILED, provider=name, sandbox_id=None, lease_id=None, why=str(error))
            )
    return places, unreachable


def show(findings: list[Finding], *, as_json: bool) -> int:
    if as_json:
        print_json(
            [
                {
                    "action": str(one.action),
                    "provider": one.provider,
                    "id": one.sandbox_id,
                    "lease_id": one.lease_id,
                    "why": one.why,
                    "age_seconds": None if one.age_seconds is None else round(one.age_seconds, 1),
                    "tags": list(one.tags),
                }
                for one in findings
            ]
        )
    else:
        rows = [
            [
                str(one.action),
                one.provider,
                one.sandbox_id or one.lease_id or "-",
                "-" if one.age_seconds is None else duration(one.age_seconds),
                one.why,
            ]
            for one in findings
        ]
        print_table(["action", "provider", "id", "age", "why"], rows, empty="nothing to sweep")
        if findings:
            counts = Counter(one.action for one in findings)
            print(", ".join(f"{count} {action}" for action, count in counts.items()))
    return exit_codes.ERROR if any(one.action is Action.FAILED for one in findings) else exit_codes.OK
