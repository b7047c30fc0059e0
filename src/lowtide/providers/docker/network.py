"""The networks of containers: one of lowtide's own on the engine, and the proxy of a container that has an allow-list.

With an allow-list the container has a network namespace with nothing but its loopback (``NetworkMode: none``), so no two sandboxes
reach each other and nothing is left behind at the engine. The proxy ends with the container's first process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import SandboxFailedError, UnsupportedError
from lowtide.providers.base import Network
from lowtide.providers.docker import container
from lowtide.providers.docker.access import Endpoint
from lowtide.providers.docker.client import EngineClient, is_engine_id
from lowtide.providers.docker.errors import SERVICE
from lowtide.providers.network import start


async def own_network(client: EngineClient) -> str:
    """The engine's id of lowtide's network, which is made where there is none.

    Engines let several networks have one name, and then refuse the name as ambiguous. So the oldest counts, for everybody who
    looks, containers name it by its id, and the others are removed unless something uses them.
    """
    import aiodocker

    found = await _own_networks(client)
    if not found:
        try:
            await client.request("POST", "networks/create", body=container.network_body())
        except aiodocker.DockerError as error:
            if error.status != 409 and "already" not in error.message:
                raise
        found = await _own_networks(client)
    if not found:
        words = (
            f"the engine has a network {container.NETWORK} that is not lowtide's: remove or rename it "
            f"(docker network rm {container.NETWORK})"
        )
        raise SERVICE.error(SandboxFailedError, words, reason="network-taken")
    first, *others = found
    for other in others:
        try:
            await client.order(f"networks/{other}", method="DELETE")
        except aiodocker.DockerError:
            continue  # in use, or somebody else has removed it
    return first


async def _own_networks(client: EngineClient) -> list[str]:
    """By name and label, the oldest first."""
    query = {"filters": json.dumps({"label": [f"{container.CACHE_LABEL}=network"]})}
    found = await client.request("GET", "networks", params=query)
    ours = [
        (str(one.get("Created")), str(one["Id"]))
        for one in found
        if isinstance(one, dict) and one.get("Name") == container.NETWORK and is_engine_id(one.get("Id"))
    ]
    return [identity for _, identity in sorted(ours)]


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
