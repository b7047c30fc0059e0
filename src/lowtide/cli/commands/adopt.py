"""`lowtide adopt`: a sandbox survives its owner, until a time."""

from __future__ import annotations

import click

from lowtide.cli.parameters import complete_ids, json_option, positive_seconds, provider_option


@click.command("adopt", short_help="Keep a sandbox alive beyond its owner, until a time.")
@provider_option
@click.option(
    "--keep-for",
    type=positive_seconds,
    default=86_400.0,
    metavar="TIME",
    help="How long from now (default: 24h).",
)
@click.option("--take", is_flag=True, help="Also from an owner that lives; it lets go.")
@json_option
@click.argument("sandboxes", nargs=-1, required=True, metavar="ID…", shell_complete=complete_ids)
def command(
    *, provider: str | None, keep_for: float, take: bool, as_json: bool, sandboxes: tuple[str, ...]
) -> None:
    """Keep the sandboxes ID… until a time, whoever exits or crashes.

    For what is orphaned, kept or released. What a living process owns is refused, unless --take takes it. A process of yours takes one over for good with `session.adopt(sandbox)`; `lowtide rm` deletes it earlier.
    """
    from lowtide.cli.adopting import adopt_and_keep
    from lowtide.cli.text import print_json, timestamp, until
    from lowtide.engine import engine

    kept = [engine().run(adopt_and_keep(text, provider, keep_for, take)) for text in sandboxes]
    if as_json:
        print_json(
            [
                {"id": row.sandbox_id, "provider": row.provider, "kept_until": timestamp(row.kept_until)}
                for row in kept
            ]
        )
        return
    for row in kept:
        print(f"{row.sandbox_id} is kept and ends {until(row.kept_until)}")
