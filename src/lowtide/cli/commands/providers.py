"""`lowtide providers`: which there are, which are installed, what each can do."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option


@click.command("providers", short_help="List the providers and what each can do.")
@json_option
def command(*, as_json: bool) -> None:
    """List the providers and what each can do.

    One that is not installed says which command installs it.
    """
    from lowtide.cli.text import print_json, print_table
    from lowtide.defaults import default_provider
    from lowtide.errors import LowtideError
    from lowtide.providers import registry

    default = default_provider()
    found = []
    for name, entry in sorted(registry.known().items(), key=lambda item: (item[0] != default, item[0])):
        try:
            capabilities = sorted(str(one) for one in registry.provider_class(name).capabilities)
            missing = None if entry.installed else entry.install
        except (LowtideError, AttributeError) as error:
            capabilities, missing = [], entry.install or str(error)
        found.append(
            {
                "name": name,
                "default": name == default,
                "summary": entry.summary,
                "installed": missing is None,
                "install": missing,
                "capabilities": capabilities,
            }
        )
    if as_json:
        print_json(found)
        return
    print_table(
        ["provider", "what it is", "status", "can"],
        [
            [
                str(row["name"]) + (" (default)" if row["default"] else ""),
                str(row["summary"]),
                "ready" if row["installed"] else str(row["install"]),
                " ".join(map(str, row["capabilities"])) or "-",  # type: ignore[call-overload]
            ]
            for row in found
        ],
        empty="no providers",
    )
