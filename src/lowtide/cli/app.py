"""The table of commands, and the one place where a failure becomes a line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from lowtide._version import __version__
from lowtide.cli import exit_codes

# Each command is a file in `commands` that is imported when it is called. The one-line help is repeated
# here so that `lowtide --help` imports none of them; a test compares the two.
COMMANDS = {
    "demo": "A tour: sandboxes, streams, a snapshot, a kill -9, and nothing left.",
    "run": "Run a command in a new sandbox and return its exit code.",
    "exec": "Run a command in a sandbox that exists.",
    "shell": "Open a terminal in a sandbox, new or existing.",
    "ls": "List sandboxes: state, owner, age, expiry.",
    "top": "Watch every sandbox live: state, owner, age, cost; stop, keep, enter.",
    "ui": "Serve a page on loopback that shows every sandbox live.",
    "stop": "End sandboxes gracefully; the keep policy holds.",
    "rm": "Delete sandboxes, kept or not.",
    "cp": "Copy files or directories into or out of a sandbox.",
    "image": "Import, pull, list, remove and prune images of the local provider.",
    "snapshot": "List and remove snapshots of sandboxes.",
    "mcp": "Serve sandboxes as tools to an MCP client.",
    "emulate": "Serve providers' own protocols on this machine (e2b, daytona, runloop, coreweave, modal).",
    "sweep": "Find orphans and end those that may be ended.",
    "forget": "Settle a lease whose account can no longer be asked.",
    "adopt": "Keep a sandbox alive beyond its owner, until a time.",
    "history": "What happened to a sandbox, step by step.",
    "report": "Sandboxes, hours, estimated costs, and what clean-up saved.",
    "guardian": "The process that ends what crashed owners left.",
    "doctor": "What this machine can and cannot do, with the fix for each.",
    "providers": "List the providers and what each can do.",
    "completion": "Print the completion script of a shell.",
    "config": "Every setting, its value, and where the value came from.",
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is called, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"lowtide.cli.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f"did you mean `lowtide {near[0]}`?" if near else "`lowtide --help` lists them"
            raise click.UsageError(f"there is no command {args[0]!r}; {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="LOWTIDE_HOME is where state lives, LOWTIDE_PROVIDER the default provider. Exit codes: docs/cli.md.",
)
@click.option(
    "--debug", is_flag=True, envvar="LOWTIDE_DEBUG", help="Show the traceback of a failure and the log."
)
@click.version_option(__version__, prog_name="lowtide", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx: click.Context, debug: bool) -> None:
    """Sandboxes for untrusted code on any provider, with nothing left behind."""
    if debug:
        import logging

        # The level of lowtide's own logger only: SDKs and their transports log keys and whole requests at DEBUG.
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
        logging.getLogger("lowtide").setLevel(logging.DEBUG)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run() -> NoReturn:
    """Run the command line and leave with its exit code."""
    _open_missing_streams()
    debug = "--debug" in sys.argv[1:2] or bool(os.environ.get("LOWTIDE_DEBUG"))
    try:
        code = _invoke()
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        code = done.exit_code
    except BrokenPipeError:
        code = _reader_left()
    except BaseException as error:
        from lowtide.cli.failures import explain, print_traceback

        if debug and isinstance(error, Exception) and not isinstance(error, click.ClickException):
            print_traceback(error)
        line, code = explain(error)
        if line:
            print(f"lowtide: {line}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
    sys.exit(code if isinstance(code, int) else exit_codes.OK)


def _open_missing_streams() -> None:
    """A closed stream's number goes to whatever is opened next: a command's output must not end up in the ledger."""
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)  # the lowest free number; to write to a closed output stays an error
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - as long as we run
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _invoke() -> object:
    # Not `app.main`: that one turns a reader who left into exit code 1.
    if "_LOWTIDE_COMPLETE" in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(app, {}, "lowtide", "_LOWTIDE_COMPLETE", os.environ["_LOWTIDE_COMPLETE"])
    with app.make_context("lowtide", sys.argv[1:]) as context:
        return app.invoke(context)


def _reader_left() -> int:
    _discard_output()
    return exit_codes.BROKEN_PIPE


def _discard_output() -> None:
    # Otherwise the interpreter tries to flush once more at exit and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
