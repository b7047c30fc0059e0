"""`lowtide ui`: the fleet as a web page on loopback."""

from __future__ import annotations

import click

from lowtide.cli.parameters import provider_option, tag_option


@click.command("ui", short_help="Serve a page on loopback that shows every sandbox live.")
@provider_option
@tag_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="PORT",
    help="The port on 127.0.0.1 (0: any free port).",
)
@click.option("--open/--no-open", "opens", default=None, help="Open a browser (default: on a desktop only).")
def command(*, provider: str | None, tags: tuple[str, ...], port: int, opens: bool | None) -> None:
    """Serve a page on loopback that shows every sandbox live, until Ctrl+C.

    The printed link works once, in one browser. After each use another link is printed.
    """
    import asyncio
    import os

    from lowtide.errors import MissingDependencyError

    try:
        from lowtide.ui.server import Ui
    except ImportError as error:
        install = "pip install 'lowtide[ui]'"
        raise MissingDependencyError(
            f"`lowtide ui` needs {error.name}: {install}", install=install
        ) from error
    from lowtide.ui import prices
    from lowtide.ui.fleet import Fleet

    ui = Ui(
        fleet=Fleet(provider=provider, tags=tags),
        prices=prices.load(),
        settings=_settings,
        doctor=_doctor,
        announce=lambda link: click.echo(f"lowtide ui: for another browser: {link}"),
    )

    async def serve() -> None:
        import signal

        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with ui.serving(port) as link:
            click.echo(f"lowtide ui: {link}")
            if opens or (opens is None and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))):
                import webbrowser

                await asyncio.to_thread(webbrowser.open, link)
            await ended.wait()

    asyncio.run(serve())


def _settings() -> list[dict[str, object]]:
    from lowtide.cli.settings import collect

    return [{"key": one.key, "value": one.value, "source": one.source} for one in collect()]


def _doctor() -> list[dict[str, object]]:
    from lowtide.cli.checking import check_all

    return [
        {"about": one.about, "check": one.name, "ok": one.ok, "why": one.why, "fix": one.fix}
        for one in check_all(None)
    ]
