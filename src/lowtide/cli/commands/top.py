"""`lowtide top`: the fleet, live, in a terminal."""

from __future__ import annotations

import sys

import click

from lowtide.cli.parameters import provider_option, tag_option


@click.command("top", short_help="Watch every sandbox live: state, owner, age, cost; stop, keep, enter.")
@provider_option
@tag_option
def command(*, provider: str | None, tags: tuple[str, ...]) -> None:
    """Watch every sandbox of every configured provider, live.

    / filters, o sorts, g groups by provider, owner or tag. On the selected sandbox: s destroys, k keeps it for a day,
    a takes it from its owner and keeps it, t opens a shell, l follows its log, Enter shows its history. q quits.
    """
    from lowtide.errors import MissingDependencyError

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("`lowtide top` needs a terminal; `lowtide ls` prints the same once")
    try:
        from lowtide.ui.top import Top
    except ImportError as error:
        install = "pip install 'lowtide[top]'"
        raise MissingDependencyError(
            f"`lowtide top` needs {error.name}: {install}", install=install
        ) from error
    from lowtide.ui import prices
    from lowtide.ui.fleet import Fleet

    Top(Fleet(provider=provider, tags=tags), prices.load()).run()
