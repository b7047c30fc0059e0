"""`lowtide shell`: a terminal in a sandbox."""

from __future__ import annotations

from typing import Any

import click

from lowtide.cli.parameters import complete_ids, creation_arguments, creation_options

_SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi")


@click.command("shell", short_help="Open a terminal in a sandbox, new or existing.")
@creation_options
@click.argument("sandbox", required=False, metavar="[ID]", shell_complete=complete_ids)
def command(*, sandbox: str | None, **creation: Any) -> int:
    """Open a terminal in the sandbox ID, or in a new one that is gone when you leave.

    Keys go inside, Ctrl+C too; the window's size follows. `exit` or Ctrl+D leaves.
    """
    from lowtide.cli.running import require_terminal, run_in_new_sandbox, run_in_sandbox

    require_terminal()
    arguments = creation_arguments(**creation)
    if sandbox is None:
        return run_in_new_sandbox(arguments, _SHELL, stdin=True, tty=True)
    provider = arguments.pop("provider", None)
    environment = arguments.pop("environment_variables", {})
    workdir = arguments.pop("working_dir", None)
    if arguments:
        raise click.UsageError(
            f"{', '.join(sorted(arguments))} can only be chosen for a new sandbox: leave out {sandbox}, or the option"
        )
    return run_in_sandbox(
        sandbox, _SHELL, provider=provider, stdin=True, tty=True, workdir=workdir, environment=environment
    )
