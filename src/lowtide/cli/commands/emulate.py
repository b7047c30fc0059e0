"""`lowtide emulate`: serve providers' own protocols on this machine."""

from __future__ import annotations

import contextlib
import json as json_format
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lowtide.emulators.ground import AnsweredCall


_WIDTH_FOR_NAMES = 72


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
    short_help="Serve providers' own protocols on this machine (e2b, daytona, runloop, coreweave, modal).",
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
@click.option(
    "--network",
    default="none",
    show_default=True,
    metavar="N",
    help="What a sandbox may reach that asks for nothing else: none, internet, host, or allow=HOST,….",
)
@click.option(
    "--packages",
    type=click.Choice(["check", "skip"]),
    default="check",
    show_default=True,
    help="What apt-get and its like are to install in a build: must be on this machine, or is left out.",
)
@click.option("--log", "log_calls", is_flag=True, help="Show calls as they are answered, on standard error.")
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
    network: str,
    packages: str,
    log_calls: bool,
    as_json: bool,
) -> None:
    """Serve providers' own protocols on this machine (e2b, daytona, runloop, coreweave, modal).

    Prints the environment under which the provider's own SDK, unmodified, finds them. With
    `-- COMMAND …` it runs COMMAND with that environment set and ends after it.
    """
    from lowtide.emulators.ground import Settings
    from lowtide.emulators.serve import serve

    program: tuple[str, ...] = context.meta["command"]
    settings = Settings(
        names=names,
        host=host,
        port_base=port_base,
        allow_remote=allow_remote,
        limit=limit,
        plain=plain,
        network=network,
        packages=packages,
        on_call=_show_call if log_calls else None,
    )

    table = None if program or as_json else _Table(limit, moving=not log_calls)

    def ready(described: dict[str, Any]) -> None:
        if program:
            if network != "none":
                click.echo(f"lowtide emulate: network of the sandboxes: {network}", err=True)
            return
        if as_json:
            click.echo(json_format.dumps(described))
        else:
            for name, value in described["environment"].items():
                click.echo(f"export {name}={shlex.quote(value)}")
        sys.stdout.flush()
        if table is not None:
            table.show(described)

    def ended(left: dict[str, int]) -> None:
        said = ", ".join(f"{count} of {name}" for name, count in left.items() if count)
        if said:
            when = "when the command ended" if program else "at the end"
            click.echo(f"lowtide emulate: sandboxes alive {when}, and ended: {said}", err=True)

    try:
        alive = table.update if table is not None and table.moves else None
        code = serve(settings, ready=ready, command=program, alive=alive, ended=ended)
    finally:
        if table is not None:
            table.close()
    context.exit(code)


class _Table:
    """On standard error, so that the export lines can go to a file. In a terminal it is kept up to date in its place."""

    def __init__(self, limit: int, *, moving: bool) -> None:
        from rich.console import Console

        self._limit = limit
        self._console = Console(stderr=True, highlight=False)
        # A terminal that cannot go back shows what moves at its end only.
        self.moves = moving and self._console.is_terminal and not self._console.is_dumb_terminal
        self._described: dict[str, Any] = {}
        self._live: Any = None

    def show(self, described: dict[str, Any]) -> None:
        self._described = described
        if not self.moves:
            self._console.print(self._made({}))
            return
        from rich.live import Live

        self._live = Live(self._made({}), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def update(self, alive: dict[str, int]) -> None:
        if self._live is not None:
            self._live.update(self._made(alive), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _made(self, alive: dict[str, int]) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        described = self._described
        table = Table(box=None, pad_edge=False)
        sets = (
            self._console.width >= _WIDTH_FOR_NAMES
        )  # in a narrow terminal they would push the rest out of it
        for title in ("service", "address", "sets") if sets else ("service", "address"):
            table.add_column(title, overflow="fold")
        table.add_column("sandboxes", justify="right")
        for name, url in described["providers"].items():
            mine = [key for key in described["environment"] if key.startswith(name.upper())]
            table.add_row(name, url, *([" ".join(mine)] if sets else []), str(alive.get(name, 0)))
        others = [
            key
            for key in described["environment"]
            if not key.startswith(tuple(map(str.upper, described["providers"])))
        ]
        if others:
            proxy = described["admin"]["url"].removesuffix("/_lowtide")
            table.add_row("proxy", proxy, *([" ".join(others)] if sets else []))
        network = described["network"]
        bounds = f"at most {self._limit} sandboxes, network: {network}; Ctrl+C ends it and every sandbox"
        return Group(table, Text(bounds))


def _show_call(call: AnsweredCall) -> None:
    colour = "green" if 200 <= call.status < 400 else "yellow" if 400 <= call.status < 500 else "red"
    status = click.style(str(call.status or "cut"), fg=colour)
    took = f"{call.seconds * 1000:7.1f} ms"
    # Whoever reaches the port chooses the path: it is one line, and says nothing to the terminal.
    operation = "".join(one if one.isprintable() else "?" for one in call.operation)
    with contextlib.suppress(OSError):  # nobody reads it any more: that is no reason not to answer
        click.echo(f"{call.provider:10} {status:>3} {took} {call.alive:4} alive  {operation}", err=True)
