"""`lowtide config`: every setting, its value, and where the value came from."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option


@click.command("config", short_help="Every setting, its value, and where the value came from.")
@json_option
def command(*, as_json: bool) -> None:
    """Every setting, its value, and where the value came from.

    The argument comes first, then the environment variable, then config.toml in lowtide's home, then the default.
    Values of environment variables for sandboxes are not shown: they may be secrets.
    """
    from lowtide.cli.settings import collect
    from lowtide.cli.text import print_json, print_table

    found = collect()
    if as_json:
        print_json([{"key": one.key, "value": one.value, "source": one.source} for one in found])
        return
    print_table(
        ["setting", "value", "from"],
        [[one.key, "-" if one.value in (None, (), {}) else str(one.value), one.source] for one in found],
        empty="no settings",
    )
