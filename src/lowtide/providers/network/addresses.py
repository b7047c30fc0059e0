"""What a name means on this machine, and which addresses are its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Any

from lowtide.providers.network.policy import Address, address_of

MOST_LOOKUPS = 8
"""Threads that look names up. They count as processes of a sandbox whose control group holds the proxy."""


async def of_system(name: str) -> list[Address]:
    """As every program of this machine resolves it."""
    try:
        # As bytes: a text would be encoded by a module that nobody may be allowed to load any more.
        found = await asyncio.get_running_loop().run_in_executor(_lookups, _look_up, name.encode("ascii"))
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise OSError(str(error)) from error
    except UnicodeError:
        return []
    return list(dict.fromkeys(address_of(str(item[4][0])) for item in found))


def _look_up(name: bytes) -> list[tuple[Any, ...]]:
    return list(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))


_lookups = ThreadPoolExecutor(MOST_LOOKUPS, thread_name_prefix="lowtide-lookup")


def start_lookups() -> None:
    """Start every thread now: later the sandbox's own processes may have used up its limit."""
    together = threading.Barrier(MOST_LOOKUPS + 1)
    for _ in range(MOST_LOOKUPS):
        _lookups.submit(together.wait, 10.0)
    together.wait(10.0)


def is_own(address: Address) -> bool:
    """Whether it is one of this machine's own, whatever its number is: what goes there comes from there."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # sends nothing
            return address_of(probe.getsockname()[0]) == address
    except OSError:
        return False


def reaches_ipv6() -> bool:
    """Whether this machine has a route to the IPv6 internet."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect(("2001:4860:4860::8888", 9))  # sends nothing
            return True
    except OSError:
        return False
