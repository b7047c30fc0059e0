"""What a sandbox's network refused: the line after a command that failed, and the rows of `lowtide history`."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, cast

from lowtide.engine import engine
from lowtide.providers.base import Capability

if TYPE_CHECKING:
    from lowtide.providers.base import DeniedConnection, Provider

_SHOWN = 3
# pip has a line of its own, inside the sandbox (providers/local/pip_hint.py).
_PACKAGE_MANAGERS = {
    "npm": "registry.npmjs.org",
    "npx": "registry.npmjs.org",
    "yarn": "registry.yarnpkg.com",
    "pnpm": "registry.npmjs.org",
    "apt": "deb.debian.org",
    "apt-get": "deb.debian.org",
}
_FETCHES = re.compile(
    rf"(?:^|[\s/;&|])({'|'.join(sorted(_PACKAGE_MANAGERS, reverse=True))})\s(?:.*\s)?(?:i|ci|add|install|update|create)(?:\s|$)"
)


def denied(provider: Provider, sandbox_id: str) -> list[DeniedConnection]:
    """Oldest first; empty where the provider does not tell."""
    if Capability.DENIED_CONNECTIONS not in provider.capabilities:
        return []
    asked = cast("Any", provider).denied_connections(sandbox_id)
    found: list[DeniedConnection] = engine().run(asked)
    return found


def target(one: DeniedConnection) -> str:
    host = f"[{one.host}]" if ":" in one.host and one.port is not None else one.host
    return host if one.port is None else f"{host}:{one.port}/{one.protocol}"


def print_hint(
    provider: Provider, sandbox_id: str, cmd: tuple[str, ...], *, offline: bool = False, since: float = 0.0
) -> None:
    """One line to standard error after a command that failed, where its network may be the reason.

    `offline`: the sandbox was created without a network. `since`: only what was refused from then on.
    """
    if offline:
        fetches = _FETCHES.search(" ".join(cmd))
        if fetches is not None:
            host = _PACKAGE_MANAGERS[fetches[1]]
            print(
                f"lowtide: this sandbox has no network, so {fetches[1]} reaches no registry: "
                f"use --network internet, or --network {host}",
                file=sys.stderr,
            )
        return
    refused = [one for one in denied(provider, sandbox_id) if one.at.timestamp() >= since]
    if not refused:
        return
    shown = ", ".join(dict.fromkeys(f"{target(one)} ({one.reason})" for one in refused[:_SHOWN]))
    more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    print(
        f"lowtide: this sandbox's network refused {shown}{more}; `lowtide history {sandbox_id}` lists all",
        file=sys.stderr,
    )
