"""`lowtide mcp`: sandboxes as tools for every client of the Model Context Protocol."""

from __future__ import annotations

import sys
from typing import Any

import click

from lowtide.cli.parameters import creation_arguments, creation_options, positive_seconds


@click.command("mcp", short_help="Serve sandboxes as tools to an MCP client.")
@click.option(
    "--http",
    "port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve streamable HTTP on loopback instead of standard input and output (0: any free port).",
)
@click.option("--print-config", is_flag=True, help="Print what to paste into the common clients, and leave.")
@click.option(
    "--timeout",
    type=positive_seconds,
    default="2m",
    show_default=True,
    help="Of a command that asks for no other.",
)
@click.option(
    "--max-timeout",
    type=positive_seconds,
    default="1h",
    show_default=True,
    help="The longest one may ask for.",
)
@click.option(
    "--max-output", type=click.IntRange(1024), default=65536, show_default=True, help="Bytes of each stream."
)
@click.option(
    "--max-sandboxes", type=click.IntRange(1), default=8, show_default=True, help="For each connection."
)
@click.option(
    "--allow-image",
    "images",
    multiple=True,
    metavar="PATTERN",
    help="Let clients choose images that match, although they have to be fetched ('python:*'; '*': any). Repeatable.",
)
@click.option(
    "--idle",
    type=positive_seconds,
    default="10m",
    show_default=True,
    help="With --http: when a client that keeps no stream open counts as gone.",
)
@creation_options
def command(
    *,
    port: int | None,
    print_config: bool,
    timeout: float,
    max_timeout: float,
    max_output: int,
    max_sandboxes: int,
    images: tuple[str, ...],
    idle: float,
    **creation: Any,
) -> int:
    """Serve sandboxes as tools to an MCP client: run_command, run_code, files, ports.

    The client starts it and talks over standard input and output; --print-config shows how. Each connection has a
    sandbox of its own, made when first needed; everything ends with the connection, also when either side is killed.

    \b
    Example: lowtide mcp --print-config --memory 1Gi --network none
    """
    from lowtide.defaults import SandboxDefaults
    from lowtide.errors import MissingDependencyError
    from lowtide.integrations.mcp import client_config

    defaults = creation_arguments(**creation)
    SandboxDefaults(**defaults)  # a mistake shows here, and not at the first call
    if print_config:
        arguments = _without(sys.argv[sys.argv.index("mcp") + 1 :], "--print-config")
        if port is None:
            click.echo(client_config.stdio_config(arguments))
        else:
            click.echo(client_config.http_config(port, *client_config.own_token()))
        return 0
    try:
        from lowtide.integrations.mcp.connection import Bounds
        from lowtide.integrations.mcp.server import serve_stdio
    except ImportError as error:
        install = "pip install 'lowtide[mcp]'"
        raise MissingDependencyError(
            f"`lowtide mcp` needs {error.name}: {install}", install=install
        ) from error
    bounds = Bounds(
        sandboxes=max_sandboxes,
        timeout_seconds=timeout,
        max_timeout_seconds=max(timeout, max_timeout),
        output_bytes=max_output,
        images=images,
    )
    if port is None:
        serve_stdio(defaults, bounds)
        return 0
    from lowtide.integrations.mcp.http import serve_http

    token, source = client_config.own_token()

    def ready(address: str) -> None:
        click.echo(f"lowtide mcp: {address} (token: {source})", err=True)

    serve_http(defaults, bounds, port=port, token=token, idle_seconds=idle, ready=ready)
    return 0


def _without(arguments: list[str], word: str) -> list[str]:
    return [one for one in arguments if one != word]
