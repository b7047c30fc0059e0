"""`lowtide sweep`: end what nobody owns any more, and say why everything else was left."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option, provider_option, seconds, tag_option


@click.command("sweep", short_help="Find orphans and end those that may be ended.")
@provider_option
@tag_option
@click.option("--older-than", type=seconds, default=0.0, metavar="TIME", help="Only what is older: 30m, 2h.")
@click.option("--dry-run", "-n", is_flag=True, help="Only say what would be ended.")
@json_option
def command(
    *, provider: str | None, tags: tuple[str, ...], older_than: float, dry_run: bool, as_json: bool
) -> int:
    """Find orphans and end those that may be ended.

    A sandbox is ended only on proof: it is in this ledger and its owner is dead, or the time it was kept for is
    over. For everything else it says why it was left. Without --provider: the default one, and every one with
    something in the ledger. Exit code 1 when something could not be ended.
    """
    from lowtide.cli.sweeping import run_sweep, show

    return show(
        run_sweep(provider, tags=tags, older_than_seconds=older_than, dry_run=dry_run), as_json=as_json
    )
