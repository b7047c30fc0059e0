"""`lowtide history`: what happened to a sandbox, step by step."""

from __future__ import annotations

import click

from lowtide.cli.parameters import complete_ids, json_option


@click.command("history", short_help="What happened to a sandbox, step by step.")
@json_option
@click.argument("sandbox", metavar="ID", shell_complete=complete_ids)
def command(*, sandbox: str, as_json: bool) -> None:
    """Every change in the life of the sandbox ID and what its network refused, also after it is gone."""
    from lowtide.cli.addressing import lease_named
    from lowtide.cli.refused import denied, target
    from lowtide.cli.text import print_json, print_table, timestamp
    from lowtide.engine import engine
    from lowtide.errors import SandboxNotFoundError
    from lowtide.lifecycle.leases import lifecycle
    from lowtide.providers import registry
    from lowtide.providers.base import Capability, DeniedConnection

    lease = engine().run(lease_named(sandbox, ended_too=True))
    if lease is None:
        raise SandboxNotFoundError(
            f"the ledger knows no sandbox {sandbox}; `lowtide ls --all` lists what it knows"
        )
    lines = engine().run(lifecycle().ledger.history(lease.lease_id))
    refused: list[DeniedConnection] = []
    if Capability.DENIED_CONNECTIONS in registry.provider_class(lease.provider).capabilities:
        refused = denied(registry.provider(lease.provider), lease.sandbox_id or lease.lease_id)
    if as_json:
        changes = [
            {
                "at": timestamp(line.at),
                "before": line.before,
                "after": line.after,
                "pid": line.pid,
                "why": line.why,
            }
            for line in lines
        ]
        refusals = [
            {
                "at": timestamp(one.at.timestamp()),
                "refused": one.host,
                "port": one.port,
                "protocol": one.protocol,
                "why": one.reason,
            }
            for one in refused
        ]
        print_json(sorted([*changes, *refusals], key=lambda row: str(row["at"])) if refusals else changes)
        return
    print(
        f"{lease.sandbox_id or lease.lease_id} ({lease.provider}), owner {lease.owner.pid} on {lease.owner.host}"
    )
    begin = lines[0].at if lines else 0.0
    rows = [(line.at, str(line.after), str(line.pid), line.why or "-") for line in lines]
    rows += [(one.at.timestamp(), "refused", "network", f"{target(one)}: {one.reason}") for one in refused]
    print_table(
        ["time", "since start", "state", "by", "why"],
        [
            [timestamp(at) or "", f"+{at - begin:.3f} s", state, by, why]
            for at, state, by, why in sorted(rows, key=lambda row: row[0])
        ],
        empty="no history",
    )
