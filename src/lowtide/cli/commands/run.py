"""`lowtide run`: a command in a new sandbox that is gone afterwards."""

from __future__ import annotations

from typing import Any

import click

from lowtide.cli.parameters import (
    COMMAND_SETTINGS,
    creation_arguments,
    creation_options,
    passes_stdin,
    stdin_option,
    timeout_option,
    tty_option,
)


@click.command(
    "run",
    short_help="Run a command in a new sandbox and return its exit code.",
    context_settings=COMMAND_SETTINGS,
)
@creation_options
@timeout_option
@stdin_option
@tty_option
@click.argument("cmd", nargs=-1, required=True, metavar="-- CMD…")
def command(
    *, timeout: float | None, stdin: bool | None, tty: bool, cmd: tuple[str, ...], **creation: Any
) -> int:
    """Run CMD in a new sandbox and return its exit code.

    Output is passed on as it comes, byte for byte, and so is our standard input when it is no terminal. The sandbox is gone afterwards, unless --keep says
    otherwise; with `--keep on-failure` a non-zero exit code is a failure. Ctrl+C goes inside; a second one ends
    the sandbox at once.

    \b
    Example: lowtide run --memory 512Mi --env TOKEN -- python3 - < job.py
    """
    from lowtide.cli.running import run_in_new_sandbox

    return run_in_new_sandbox(
        creation_arguments(**creation), cmd, stdin=passes_stdin(stdin), tty=tty, timeout_seconds=timeout
    )
