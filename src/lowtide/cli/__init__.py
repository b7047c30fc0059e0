"""The command line `lowtide`. Nothing but click is imported before a command is known."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """The console script."""
    from lowtide.cli.app import run

    run()
