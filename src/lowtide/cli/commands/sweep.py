"""`lowtide sweep`: end what nobody owns any more, and say why everything else was left."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option, provider_option, seconds, tag_option


@click.command("sweep", short_help="Find orphans and end those that may be ended.")
@provider_option
@tag_option
@click.option("--older-than", type=seconds, default=0.0, metavar="TIME", help="Only what is older: 30m, 2h.")
@click.option("--dry-run", "-n", is_flag=True, help="Only say what would be ended.")
@click.option(
    "--all-ledgers", is_flag=True, help="List what other ledgers (or a lost one) left, and ask about each."
)
@json_option
def command(
    *,
    provider: str | None,
    tags: tuple[str, ...],
    older_than: float,
    dry_run: bool,
    all_ledgers: bool,
    as_json: bool,
) -> int:
    """Find orphans and end those that may be ended.

    A sandbox is ended only on proof: it is in this ledger and its owner is dead, or the time it was kept for is
    over. For everything else it says why it was left. Without --provider: the default one, and every one with
    something in the ledger. Exit code 1 when something could not be ended.

    With --all-ledgers, for when a ledger was lost: everything of the provider that lowtide made and that this
    ledger does not know is listed with its ledger, owner and age. Nothing of it is ended without your yes.
    """
    from lowtide.cli.sweeping import run_sweep, show
    from lowtide.cli.unknown import ask_and_end

    if all_ledgers:
        return ask_and_end(
            provider, tags=tags, older_than_seconds=older_than, dry_run=dry_run, as_json=as_json
        )

    return show(
        run_sweep(provider, tags=tags, older_than_seconds=older_than, dry_run=dry_run), as_json=as_json
    )
