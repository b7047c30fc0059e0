"""`lowtide guardian`: the process that ends what crashed owners left."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option


@click.group("guardian", short_help="The process that ends what crashed owners left.")
def command() -> None:
    """The process that ends what crashed owners left.

    There is nothing to start or stop: it comes with the first sandbox and leaves when nothing is left to watch.
    """


@command.command("status")
@json_option
def status(*, as_json: bool) -> None:
    """Whether it runs, whom it watches, what it is ending, and where its log is."""
    from lowtide.cli.guarding import ask_guardian
    from lowtide.cli.text import one_line, print_json

    found = ask_guardian()
    if as_json:
        print_json(found)
    elif not found["running"]:
        print("no guardian runs: nothing is left to watch")
    else:
        print(
            f"guardian {found['pid']} watches {len(found['owners'])} owners and is ending {len(found['ending'])} leases"
        )
        for pid in found["owners"]:
            print(f"  owner {pid}")
        for lease_id in found["ending"]:
            print(f"  ending {lease_id}")
        for note in found["notes"]:
            print(f"  note: {one_line(note)}")
        print(f"version {found['version']} from {found['installation']}")
    if not as_json:
        print(f"log: {found['log']}")
