"""`lowtide image`: what the local provider's sandboxes can run on."""

from __future__ import annotations

import click

from lowtide.cli.parameters import json_option


@click.group("image", short_help="Import, pull, list, remove and prune images of the local provider.")
def command() -> None:
    """Import, pull, list, remove and prune images of the local provider.

    A sandbox runs on one with `lowtide run --image NAME` or `Sandbox.run(container_image="NAME")`.
    """


@command.command("import")
@json_option
@click.argument("name")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def import_(*, name: str, file: str, as_json: bool) -> None:
    """Import FILE as NAME: a tar of a root filesystem, of `docker save`, or an OCI layout."""
    from lowtide.cli.images import import_image

    import_image(name, file, as_json=as_json)


@command.command("pull")
@json_option
@click.argument("reference")
def pull(*, reference: str, as_json: bool) -> None:
    """Pull REFERENCE from its registry, for example python:3.11."""
    from lowtide.cli.images import pull_image

    pull_image(reference, as_json=as_json)


@command.command("ls")
@json_option
def list_(*, as_json: bool) -> None:
    """List the images."""
    from lowtide.cli.images import list_images

    list_images(as_json=as_json)


@command.command("rm")
@click.option("--missing-ok", is_flag=True, help="One that does not exist is fine.")
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
def remove(*, names: tuple[str, ...], missing_ok: bool) -> int:
    """Remove images; refused while a sandbox runs on one."""
    from lowtide.cli.images import remove_images

    return remove_images(names, missing_ok=missing_ok)


@command.command("prune")
@json_option
def prune(*, as_json: bool) -> None:
    """Remove the layers that emulators keep of what they built; images stay."""
    from lowtide.cli.images import prune_layers

    prune_layers(as_json=as_json)
