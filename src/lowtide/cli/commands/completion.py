"""`lowtide completion`: what a shell needs to complete commands, options and ids."""

from __future__ import annotations

import click


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(*, shell: str) -> None:
    """Print the completion script of SHELL: commands, options and the ids of sandboxes.

    \b
    bash: eval "$(lowtide completion bash)" in ~/.bashrc
    zsh:  eval "$(lowtide completion zsh)" in ~/.zshrc
    fish: lowtide completion fish > ~/.config/fish/completions/lowtide.fish
    """
    from click.shell_completion import get_completion_class

    from lowtide.cli.app import app

    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"there is no completion for {shell}")
    template = found(app, {}, "lowtide", "_LOWTIDE_COMPLETE")
    click.echo(template.source_template % template.source_vars())
