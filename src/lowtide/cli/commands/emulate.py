"""`lowtide emulate`: serve providers' own protocols on this machine."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from typing import Any

import click


class _WithCommand(click.Command):
    """Everything after the first `--` is the command to run; click itself would drop the `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        command: list[str] = []
        if "--" in args:
            cut = args.index("--")
            args, command = args[:cut], args[cut + 1 :]
        ctx.meta["command"] = tuple(command)
        return super().parse_args(ctx, args)


@click.command(
    "emulate",
    cls=_WithCommand,
    short_help="Serve providers' own protocols on this machine (e2b, daytona).",
)
@click.argument("names", nargs=-1, required=True)
@click.option(
    "--port-base",
    type=int,
    help="First port; each emulator takes one, the proxy the next. Default: any free.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on.")
@click.option("--allow-remote", is_flag=True, help="Allow an address that other machines can reach.")
@click.option("--plain", is_flag=True, help="Point SDKs at plain URLs instead of the CONNECT proxy.")
@click.option("--limit", type=int, default=500, show_default=True, help="Most sandboxes at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of export lines.")
@click.pass_context
def command(
    context: click.Context,
    names: tuple[str, ...],
    port_base: int | None,
    host: str,
    allow_remote: bool,
    plain: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Serve providers' own protocols on this machine (e2b, daytona).

    Prints the environment under which the provider's own SDK, unmodified, finds them. With
    `-- COMMAND …` it runs COMMAND with that environment set and ends after it.
    """
    from lowtide.emulators.ground import Settings
    from lowtide.emulators.serve import serve

    program: tuple[str, ...] = context.meta["command"]
    settings = Settings(
        names=names, host=host, port_base=port_base, allow_remote=allow_remote, limit=limit, plain=plain
    )

    def ready(described: dict[str, Any]) -> None:
        if program:
            return
        if as_json:
            click.echo(json_format.dumps(described))
        else:
            for name, value in described["environment"].items():
                click.echo(f"export {name}={shlex.quote(value)}")
            click.echo(
                f"# serving {', '.join(described['providers'])}; Ctrl+C ends it and every sandbox", err=True
            )
        sys.stdout.flush()

    context.exit(serve(settings, ready=ready, command=program))
