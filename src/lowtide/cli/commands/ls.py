"""`lowtide ls`: what exists, who owns it, until when."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option, provider_option, tag_option


@click.command("ls", short_help="List sandboxes: state, owner, age, expiry.")
@provider_option
@tag_option
@click.option("--all", "-a", "everything", is_flag=True, help="Also those that are gone or were released.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=1000,
    help="With --all: at most so many ended ones, the newest.",
)
@click.option("--quiet", "-q", is_flag=True, help="Only the ids, one per line.")
@json_option
def command(
    *,
    provider: str | None,
    tags: tuple[str, ...],
    everything: bool,
    limit: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """List sandboxes: state, owner, age, expiry.

    Without --provider: all that this machine's ledger knows, of every provider and process, without a network
    call. With --provider: that provider is asked too, and sandboxes that other machines made are shown with it.
    """
    from lowtide.cli.listing import rows
    from lowtide.cli.text import age, print_json, print_table, until

    found = rows(provider=provider, tags=tags, ended=limit if everything else 0)
    if as_json:
        print_json([row.as_dict() for row in found])
    elif quiet:
        for row in found:
            print(row.id)
    else:
        print_table(
            ["id", "provider", "state", "owner", "age", "ends", "tags"],
            [
                [
                    row.id,
                    row.provider,
                    row.state,
                    row.owner_text,
                    age(row.created_at),
                    until(row.ends_at),
                    " ".join(row.tags) or "-",
                ]
                for row in found
            ],
            empty="no sandboxes" + (f" with {', '.join(tags)}" if tags else ""),
        )
