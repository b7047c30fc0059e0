"""`lowtide exec`: a command in a sandbox that exists."""

from __future__ import annotations

import click

from lowtide.cli.parameters import (
    COMMAND_SETTINGS,
    complete_ids,
    environment_option,
    passes_stdin,
    provider_option,
    stdin_option,
    timeout_option,
    tty_option,
    variables,
    workdir_option,
)


@click.command(
    "exec", short_help="Run a command in a sandbox that exists.", context_settings=COMMAND_SETTINGS
)
@provider_option
@environment_option
@workdir_option
@click.option("--user", "-u", metavar="U", help="Run as this user of the sandbox.")
@timeout_option
@stdin_option
@tty_option
@click.argument("sandbox", metavar="ID", shell_complete=complete_ids)
@click.argument("cmd", nargs=-1, required=True, metavar="-- CMD…")
def command(
    *,
    provider: str | None,
    environment: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    timeout: float | None,
    stdin: bool | None,
    tty: bool,
    sandbox: str,
    cmd: tuple[str, ...],
) -> int:
    """Run CMD in the sandbox ID and return its exit code.

    ID is what `lowtide ls` shows, or enough of its beginning or end. Whoever owns the sandbox goes on owning it.
    """
    from lowtide.cli.running import run_in_sandbox

    if cmd[:1] == ("--",):
        cmd = cmd[1:]
    return run_in_sandbox(
        sandbox,
        cmd,
        provider=provider,
        stdin=passes_stdin(stdin),
        tty=tty,
        timeout_seconds=timeout,
        workdir=workdir,
        user=user,
        environment=variables(environment),
    )
