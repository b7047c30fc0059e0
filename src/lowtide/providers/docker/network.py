"""The network of a container that has an allow-list: none of the engine's, and a proxy on this machine.

The container has a network namespace with nothing but its loopback (``NetworkMode: none``), so no two sandboxes
reach each other and nothing is left behind at the engine. The proxy ends with the container's first process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import UnsupportedError
from lowtide.providers.base import Network
from lowtide.providers.docker.access import Endpoint
from lowtide.providers.docker.errors import SERVICE
from lowtide.providers.network import start


def check(endpoint: Endpoint) -> None:
    """Before anything is made. Raises UnsupportedError where the container's network is out of reach."""
    if not endpoint.local:
        raise _unsupported("the engine is on another machine")
    if os.geteuid() != 0:
        raise _unsupported("only root may enter a container's network")


async def connect(sandbox_id: str, facts: Mapping[str, Any], network: Network, denied: Path) -> None:
    """Serve the network of a running container, as the engine describes it."""
    pid = int(facts.get("State", {}).get("Pid") or 0)
    # An engine in a virtual machine counts processes of its own: the number would be somebody else's here.
    if not pid or not _is_container(pid, str(facts["Id"])):
        raise _unsupported("the container's processes are not on this machine")
    await start.start("docker", sandbox_id, pid, _start_time(pid), network, denied)


def _start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _is_container(pid: int, container_id: str) -> bool:
    """Its own files (resolv.conf, hostname) are mounted from a directory with the container's full id."""
    try:
        own = os.stat("/proc/self/ns/net").st_ino == os.stat(f"/proc/{pid}/ns/net").st_ino
        return not own and container_id in Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return False


def _unsupported(why: str) -> UnsupportedError:
    return SERVICE.error(
        UnsupportedError,
        f"the docker provider cannot give this sandbox an allow-list: {why}",
        argument="network",
        feature="network-allow",
        alternative="the local provider, which any user may use; or network='none'",
    )
