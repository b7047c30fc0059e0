"""Options that several commands share, and the types click does not have."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def seconds(value: str | float) -> float:
    """`90`, `90s`, `15m`, `2h`, `7d`: seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value))
    if not match or match[2] not in _UNITS:
        raise click.BadParameter(f"{value!r} is no duration: say 90s, 15m, 2h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def positive_seconds(value: str | float) -> float:
    """The same, and longer than nothing: what the API takes, too."""
    found = seconds(value)
    if found <= 0:
        raise click.BadParameter(f"{value!r} is no time: say more than 0")
    return found


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
provider_option = click.option(
    "--provider", "-p", metavar="P", help="The provider (default: LOWTIDE_PROVIDER, else local)."
)
tag_option = click.option(
    "--tag", "tags", multiple=True, metavar="T", help="Only with this tag; may be repeated (all must match)."
)

COMMAND_SETTINGS = {"allow_interspersed_args": False}
"""For commands that end in CMD…: from its first word on, options are its own, with or without `--`."""

environment_option = click.option(
    "--env",
    "-e",
    "environment",
    multiple=True,
    metavar="K=V",
    help="An environment variable; K alone passes yours on.",
)
workdir_option = click.option("--workdir", "-w", metavar="DIR", help="The working directory (absolute).")
timeout_option = click.option(
    "--timeout",
    type=positive_seconds,
    metavar="TIME",
    help="End the command after this long: 90s, 15m. Exit code 124.",
)
stdin_option = click.option(
    "--stdin/--no-stdin",
    "-i",
    default=None,
    help="Pass our standard input on (default: when it is no terminal).",
)
tty_option = click.option("--tty", "-t", is_flag=True, help="Give it a terminal (implies --stdin).")

_KEEP = click.Choice(["never", "on-failure", "always"])

_CREATION = (
    provider_option,
    click.option(
        "--image", metavar="I", help="What the sandbox runs on: an image, or a root filesystem directory."
    ),
    click.option("--snapshot", metavar="ID", help="Start from this snapshot."),
    click.option("--tag", "tags", multiple=True, metavar="T", help="A tag; may be repeated."),
    click.option("--keep", type=_KEEP, help="When it survives its end (default: LOWTIDE_KEEP, else never)."),
    click.option(
        "--keep-for", type=positive_seconds, metavar="TIME", help="How long a kept one lives (default: 24h)."
    ),
    click.option(
        "--network",
        "-n",
        metavar="N",
        help="none, internet, host (local only), or hosts and CIDRs to allow, separated by commas.",
    ),
    click.option(
        "--isolation", type=click.Choice(["gvisor"]), help="A stronger wall than the provider's own."
    ),
    environment_option,
    workdir_option,
    click.option("--cpu", metavar="N", help="CPU limit: 0.5, 2, 500m."),
    click.option("--memory", "-m", metavar="SIZE", help="Memory limit: 256Mi, 2Gi."),
    click.option("--pids", type=click.IntRange(min=1), metavar="N", help="Most processes at once."),
    click.option("--disk", metavar="SIZE", help="Disk limit: 1Gi."),
    click.option(
        "--max-lifetime",
        type=positive_seconds,
        metavar="TIME",
        help="Its hard end, whatever else happens: 30m, 2h.",
    ),
)


def creation_options(command: F) -> F:
    """The options that describe a new sandbox; `creation_arguments` turns them into keywords."""
    for option in reversed(_CREATION):
        command = option(command)
    return command


def creation_arguments(
    *,
    provider: str | None,
    image: str | None,
    snapshot: str | None,
    tags: tuple[str, ...],
    keep: str | None,
    keep_for: float | None,
    network: str | None,
    isolation: str | None,
    environment: tuple[str, ...],
    workdir: str | None,
    cpu: str | None,
    memory: str | None,
    pids: int | None,
    disk: str | None,
    max_lifetime: float | None,
) -> dict[str, Any]:
    """Keywords for `Sandbox.run`, with only what was said: everything else keeps its default."""
    limits = {"cpu": cpu, "memory": memory, "pids": pids, "disk": disk}
    said: dict[str, Any] = {
        "provider": provider,
        "container_image": image,
        "snapshot": snapshot,
        "tags": list(tags) or None,
        "keep": keep,
        "keep_for_seconds": keep_for,
        "network": _network(network),
        "isolation": isolation,
        "environment_variables": variables(environment) or None,
        "working_dir": workdir,
        "resources": {"limits": {name: value for name, value in limits.items() if value is not None}}
        if any(limits.values())
        else None,
        "max_lifetime_seconds": max_lifetime,
    }
    return {name: value for name, value in said.items() if value is not None}


def variables(pairs: tuple[str, ...]) -> dict[str, str]:
    """`K=V` as it is, `K` with the value it has here."""
    chosen = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if equals:
            chosen[name] = value
        elif name in os.environ:
            chosen[name] = os.environ[name]
        else:
            raise click.BadParameter(f"{name} is not set here: say {name}=VALUE", param_hint="--env")
    return chosen


def _network(said: str | None) -> Any:
    if said is None or said in ("none", "internet", "host", "full"):
        return said
    return {"allow": [part for part in said.split(",") if part]}


def passes_stdin(said: bool | None) -> bool:
    """Whether our standard input goes inside: as said, else when it is a file or a pipe and no terminal."""
    if said is not None:
        return said
    try:
        return not os.isatty(0) and os.fstat(0) is not None
    except OSError:
        return False  # closed


def complete_ids(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The ids of what exists, for a shell's completion."""
    from lowtide.ui.fleet import rows

    try:
        return [row.id for row in rows(provider=None, tags=(), ended=0) if row.id.startswith(incomplete)]
    except Exception:  # a completion must never complain
        return []
