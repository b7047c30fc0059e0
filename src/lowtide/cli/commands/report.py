"""`lowtide report`: sandboxes, hours, estimated costs, and what clean-up saved."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option, positive_seconds, tag_option


@click.command("report", short_help="Sandboxes, hours, estimated costs, and what clean-up saved.")
@click.option(
    "--by",
    type=click.Choice(["provider", "tag", "day"]),
    default="provider",
    show_default=True,
    help="What each line stands for.",
)
@click.option(
    "--since",
    type=positive_seconds,
    default="30d",
    show_default=True,
    metavar="TIME",
    help="How far back: 12h, 7d, 4w.",
)
@tag_option
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV for spreadsheets.")
@click.option("--html", "as_html", is_flag=True, help="Print a page of its own, with a plot.")
def command(
    *, by: str, since: float, tags: tuple[str, ...], as_json: bool, as_csv: bool, as_html: bool
) -> None:
    """Sandboxes, hours, estimated costs, and what clean-up saved, from this machine's ledger.

    Costs use list prices and the provider's default sandbox size. LOWTIDE_PRICES names a file with your own prices.

    \b
    Example: lowtide report --by tag --since 7d --html > report.html
    """
    if as_json + as_csv + as_html > 1:
        raise click.UsageError("--json, --csv and --html exclude each other: choose one")
    import time

    from lowtide.cli.text import duration, print_json, print_table
    from lowtide.engine import engine
    from lowtide.lifecycle.leases import lifecycle
    from lowtide.ui import prices, report

    table = prices.load()
    start = time.time() - since
    found = engine().run(report.lives(lifecycle().ledger, since=start, tags=tags))
    lines = report.summarise(found, by=by, prices=table, since=start)
    if as_json:
        print_json({"currency": table.currency, "by": by, "lines": [report.as_dict(line) for line in lines]})
    elif as_csv:
        print(report.as_csv(lines, by), end="")
    elif as_html:
        period = f"The last {duration(since)}"
        print(report.as_html(lines, by=by, currency=table.currency, period=period), end="")
    else:
        print_table(
            [by, *report.HEADS],
            [[line.name, *report.cells(line, table.currency)] for line in lines],
            empty="no sandboxes",
        )
