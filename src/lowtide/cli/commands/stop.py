"""`lowtide stop`: end sandboxes gracefully."""

from __future__ import annotations

import click

from lowtide.cli.parameters import complete_ids, json_option, provider_option, seconds


@click.command("stop", short_help="End sandboxes gracefully; the keep policy holds.")
@provider_option
@click.option(
    "--grace",
    type=seconds,
    default=10.0,
    metavar="TIME",
    help="How long its processes may take to end (default: 10s).",
)
@click.option("--snapshot", is_flag=True, help="Take a snapshot first and print its id.")
@json_option
@click.argument("sandboxes", nargs=-1, required=True, metavar="ID…", shell_complete=complete_ids)
def command(
    *, provider: str | None, grace: float, snapshot: bool, as_json: bool, sandboxes: tuple[str, ...]
) -> int:
    """End the sandboxes ID… gracefully, in parallel.

    The keep policy holds: a running sandbox made with `keep=always` becomes a kept one. One that is already kept
    is ended.
    """
    from lowtide.cli.ending import report_all, stop_one
    from lowtide.operation import Operation

    started = [
        (text, Operation.start(stop_one(text, provider, grace_seconds=grace, snapshot=snapshot)))
        for text in sandboxes
    ]
    return report_all(started, as_json=as_json)
