"""`lowtide demo`: the two-minute tour."""

from __future__ import annotations

import click

from lowtide.cli.parameters import provider_option


@click.command("demo", short_help="A tour: sandboxes, streams, a snapshot, a kill -9, and nothing left.")
@provider_option
def command(*, provider: str | None) -> int:
    """A tour: sandboxes, streams, a snapshot, a kill -9, and nothing left.

    Takes a few seconds, needs no account and no terminal. Exit code 0 only when nothing is left at the end.
    """
    from lowtide.cli.tour import tour

    return tour(provider)
