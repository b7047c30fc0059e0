"""`lowtide ls`: what exists, who owns it, until when."""

from __future__ import annotations

import contextlib
import sys
import time

import click

from lowtide.cli.parameters import json_option, provider_option, tag_option

_EVERY_SECONDS = 2.0


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
@click.option("--watch", "-w", is_flag=True, help="Again every two seconds, until Ctrl+C.")
@json_option
def command(
    *,
    provider: str | None,
    tags: tuple[str, ...],
    everything: bool,
    limit: int,
    quiet: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """List sandboxes: state, owner, age, expiry.

    Without --provider: all that this machine's ledger knows, of every provider and process, without a network
    call. With --provider: that provider is asked too, and sandboxes that other machines made are shown with it.
    """
    if watch and as_json:
        raise click.UsageError("--watch is for people, --json for programs: say one of them")
    ended = limit if everything else 0
    if not watch:
        _show(provider, tags, ended, quiet=quiet, as_json=as_json)
        return
    with contextlib.suppress(KeyboardInterrupt):  # how it is ended, also in the middle of a look
        while True:
            if sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            _show(provider, tags, ended, quiet=quiet, as_json=as_json)
            sys.stdout.flush()
            time.sleep(_EVERY_SECONDS)


def _show(provider: str | None, tags: tuple[str, ...], ended: int, *, quiet: bool, as_json: bool) -> None:
    from lowtide.cli.text import age, print_json, print_table, until
    from lowtide.ui.fleet import rows

    found = rows(provider=provider, tags=tags, ended=ended)
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
