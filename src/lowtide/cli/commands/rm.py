"""`lowtide rm`: delete sandboxes, whatever their keep policy says."""

from __future__ import annotations

import click

from lowtide.cli.parameters import complete_ids, json_option, provider_option, tag_option


@click.command("rm", short_help="Delete sandboxes, kept or not.")
@provider_option
@tag_option
@click.option("--missing-ok", is_flag=True, help="One that does not exist is fine.")
@json_option
@click.argument("sandboxes", nargs=-1, metavar="ID…", shell_complete=complete_ids)
def command(
    *,
    provider: str | None,
    tags: tuple[str, ...],
    missing_ok: bool,
    as_json: bool,
    sandboxes: tuple[str, ...],
) -> int:
    """Delete the sandboxes ID…, and with --tag all of this ledger with these tags, whoever owns them.

    What is named is deleted: kept or not, in use or not. `lowtide sweep` ends only what nobody owns any more.
    """
    from lowtide.cli.ending import remove_one, report_all
    from lowtide.operation import Operation

    named = list(sandboxes)
    if tags:
        from lowtide.ui.fleet import rows

        named += [row.id for row in rows(provider=provider, tags=tags) if row.id not in named]
    elif not named:
        raise click.UsageError(
            "say which: ID… or --tag T; `lowtide ls` lists them", click.get_current_context()
        )
    started = [(text, Operation.start(remove_one(text, provider, missing_ok=missing_ok))) for text in named]
    return report_all(started, as_json=as_json)
