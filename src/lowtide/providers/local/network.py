"""The network of a sandbox that has the public internet or an allow-list: its proxy, started after it, ended with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from lowtide.providers.base import Limits, Network
from lowtide.providers.local import cgroups, files
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory
from lowtide.providers.network import addresses, start
from lowtide.providers.network.names import RESOLVER_FILES

_PROXY_TASKS = addresses.MOST_LOOKUPS + 1


def limits_with_proxy(limits: Limits) -> Limits:
    """The limits of the sandbox's control groups, in which its proxy runs too.

    In version 2 all controllers have one group, so the proxy's threads would be taken from the sandbox's processes.
    """
    place = cgroups.hierarchy("pids")
    if limits.pids is None or isinstance(place, str) or place.version != 2:
        return limits
    return replace(limits, pids=limits.pids + _PROXY_TASKS)


async def connect(
    directory: SandboxDirectory, inner: ProcessMark, network: Network, denied: Path, inside: files.Caller
) -> None:
    """Serve its network. The proxy ends by itself with `inner`; destroying the sandbox makes sure of it."""
    served = await start.start("local", directory.sandbox_id, inner.pid, inner.start_time, network, denied)
    with contextlib.suppress(FileNotFoundError):  # destroyed meanwhile: the caller looks
        directory.set_proxy(ProcessMark(served.pid, served.start_time))
    await files.write_file(inside, "/etc/resolv.conf", _once(RESOLVER_FILES[network.mode.value]), 0o644)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
