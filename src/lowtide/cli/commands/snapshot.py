"""`lowtide snapshot`: what was taken of sandboxes, and outlives them until it is removed."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option, provider_option


@click.group("snapshot", short_help="List and remove snapshots of sandboxes.")
def command() -> None:
    """List and remove snapshots of sandboxes.

    One is taken with `lowtide stop --snapshot ID`, `Sandbox.snapshot()` or `stop(snapshot_on_stop=True)`; a sandbox
    starts from it with `lowtide run --snapshot ID`. No sweep removes one: it may be all that is left of the work.
    """


@command.command("ls")
@provider_option
@json_option
def list_(*, provider: str | None, as_json: bool) -> None:
    """List the snapshots of the account. On a hosted provider these may be other people's too."""
    from lowtide.cli.snapshots import list_snapshots

    list_snapshots(provider, as_json=as_json)


@command.command("rm")
@provider_option
@click.option("--missing-ok", is_flag=True, help="One that does not exist is fine.")
@click.argument("snapshots", nargs=-1, required=True, metavar="ID…")
def remove(*, provider: str | None, snapshots: tuple[str, ...], missing_ok: bool) -> int:
    """Remove the snapshots ID…."""
    from lowtide.cli.snapshots import remove_snapshots

    return remove_snapshots(provider, snapshots, missing_ok=missing_ok)
