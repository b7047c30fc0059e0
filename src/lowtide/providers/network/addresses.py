"""What a name means on this machine, and which addresses are its own."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Any

from lowtide.providers.network.policy import Address, address_of

MOST_LOOKUPS = 8
"""Threads that look names up. They count as processes of a sandbox whose control group holds the proxy."""
# rtnetlink
_NETLINK_ROUTE, _NEWROUTE, _GETROUTE, _REQUEST, _ROUTE_TO = 0, 24, 26, 1, 1
_HEADER_BYTES, _TYPE_OFFSET, _UNICAST = 16, 7, 1


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
    """Whether packets to it stay on this machine, whatever its number is.

    The kernel's route decides. The address that a packet would come from does not: packets to the second address
    of an interface, or into a whole range that is routed to this machine, come from another of its addresses.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as kernel:
            kernel.settimeout(5.0)
            kernel.send(_route_request(address))
            reply = kernel.recv(1 << 16)
    except OSError:
        return _comes_from_itself(address)
    _, kind = struct.unpack_from("=IH", reply)
    return kind == _NEWROUTE and reply[_HEADER_BYTES + _TYPE_OFFSET] != _UNICAST


def _route_request(address: Address) -> bytes:
    """For the route to one address."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    packed = address.packed
    route = struct.pack("=BBBBBBBBI", family, len(packed) * 8, 0, 0, 0, 0, 0, 0, 0)
    body = route + struct.pack("=HH", 4 + len(packed), _ROUTE_TO) + packed
    return struct.pack("=IHHII", _HEADER_BYTES + len(body), _GETROUTE, _REQUEST, 1, 0) + body


def _comes_from_itself(address: Address) -> bool:
    """The same where the kernel cannot be asked for a route: finds the first address of each interface."""
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
