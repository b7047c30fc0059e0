"""`lowtide doctor`: what this machine can and cannot do, with the fix for each."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option, provider_option


@click.command("doctor", short_help="What this machine can and cannot do, with the fix for each.")
@provider_option
@json_option
def command(*, provider: str | None, as_json: bool) -> int:
    """Check this machine: lowtide's own state, and each provider that is installed (or only P).

    Exit code 0 when the default provider (or P) works, 1 when it does not.
    """
    from lowtide.cli.checking import check_all, show

    return show(check_all(provider), as_json=as_json)
