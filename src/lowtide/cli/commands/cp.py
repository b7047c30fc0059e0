"""`lowtide cp`: files and directories into and out of a sandbox."""

from __future__ import annotations

import click

from lowtide.cli.parameters import provider_option


@click.command("cp", short_help="Copy files or directories into or out of a sandbox.")
@provider_option
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@click.option(
    "--max-bytes",
    type=click.IntRange(min=1),
    help="The most that a copy out of a sandbox writes here (default: 64 GiB).",
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
def command(*, provider: str | None, quiet: bool, max_bytes: int | None, source: str, target: str) -> None:
    """Copy FROM to TO; one of them is ID:/path in a sandbox.

    As `docker cp`: into a directory that is there FROM goes with its name, and FROM/. is what it holds; a TO that is
    not there is made, with its parents. - is a tar stream, from standard input (compressed or not) or to standard
    output. A file appears whole or not at all; into a device or a pipe it is written. A local name with a colon: ./name:with-colon.

    \b
    Examples: lowtide cp data.csv 01k9…:/root/data.csv
              lowtide cp 01k9…:/root/results ./results
              lowtide cp 01k9…:/root/results - | gzip > results.tar.gz
    """
    from lowtide.cli.copying import copy_in, copy_out

    from_sandbox, to_sandbox = _in_sandbox(source), _in_sandbox(target)
    if (from_sandbox is None) == (to_sandbox is None):
        raise click.UsageError(
            "exactly one of FROM and TO is ID:/path in a sandbox", click.get_current_context()
        )
    if to_sandbox is not None:
        copy_in(source, *to_sandbox, provider=provider, quiet=quiet)
    elif from_sandbox is not None:
        copy_out(*from_sandbox, target, provider=provider, quiet=quiet, max_bytes=max_bytes)


def _in_sandbox(text: str) -> tuple[str, str] | None:
    """(sandbox, path) of `ID:path`; None for a local name."""
    before, colon, path = text.partition(":")
    if not colon or not before or "/" in before or before.startswith("."):
        return None
    return before, path or "."
