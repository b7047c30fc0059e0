"""What a sandbox may reach: the public internet, or the names and addresses of an allow-list. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Range = IPv4Network | IPv6Network

NAME_PORTS = frozenset({80, 443})  # of a name without a port: where a Host header or an SNI says who is meant
# Names have these addresses inside a sandbox, one each: a connection says by its target which name was meant.
STAND_INS = IPv4Network("198.18.0.0/15")

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_HOST = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")  # also those that are there and should not be
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

# Never, not even by name: this machine itself, its link (cloud metadata lives there), groups, what stands for names.
_NEVER: tuple[Range, ...] = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "224.0.0.0/4",
        "240.0.0.0/4",
        str(STAND_INS),
        "::/127",
        "fe80::/10",
        "ff00::/8",
    )
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")  # nothing else is routed on the public internet
# Only for an entry that lies inside one of these: private, shared or set aside, or another way to write an
# IPv4 address. 168.63.129.16 is public by number and every Azure machine's own metadata service.
_NOT_PUBLIC: tuple[Range, ...] = tuple(
    ip_network(text)
    for text in (
        "10.0.0.0/8",
        "100.64.0.0/10",
        "168.63.129.16/32",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fec0::/10",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry: a name (and all below it, with `below`) or a range of addresses."""

    text: str
    name: str | None = None
    below: bool = False
    """Only what is below the name, at any depth: ``*.example.org``."""
    range: Range | None = None
    port: int | None = None
    """None: 80 and 443 for a name, every port for a range."""

    def has_port(self, port: int) -> bool:
        if self.port is not None:
            return port == self.port
        return self.name is None or port in NAME_PORTS

    def has_name(self, name: str) -> bool:
        if self.name is None:
            return False
        return name.endswith("." + self.name) if self.below else name == self.name

    def has_address(self, address: Address) -> bool:
        """A wide range such as 0.0.0.0/0 does not open what is private inside it: that takes an entry of its own."""
        if self.range is None or address not in self.range:
            return False
        return public(address) or any(
            address in block and _within(self.range, block) for block in _NOT_PUBLIC
        )


@dataclass(frozen=True)
class Policy:
    """A whole allow-list, or the public internet."""

    entries: tuple[Entry, ...]
    internet: bool = False
    """Every public address on every port. Names have their own addresses, not stand-ins."""

    @classmethod
    def of(cls, allow: Iterable[str]) -> Policy:
        return cls(tuple(entry(text) for text in allow))

    @classmethod
    def public_internet(cls) -> Policy:
        return cls((entry("0.0.0.0/0"), entry("::/0")), internet=True)

    @cached_property
    def needs_ipv6(self) -> bool:
        return not self.internet and any(isinstance(e.range, IPv6Network) for e in self.entries)

    def allows_name(self, name: str, port: int | None = None) -> bool:
        """Only a host name is on a list."""
        return host_name(name) and any(
            e.has_name(name) and (port is None or e.has_port(port)) for e in self.entries
        )

    def allows_address(self, address: Address, port: int) -> bool:
        address = plain(address)
        if _never(address):
            return False
        return any(e.has_address(address) and e.has_port(port) for e in self.entries)

    def may_lead_to(self, address: Address, port: int) -> bool:
        """Whether an allowed name may have this address. What is not public has to be in the list itself."""
        return public(plain(address)) or self.allows_address(address, port)


def plain(address: Address) -> Address:
    """An IPv4 address that is written as an IPv6 one."""
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def public(address: Address) -> bool:
    """Of the internet, and of nobody's inside."""
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not _never(address) and not any(address in block for block in _NOT_PUBLIC)


def host_name(name: str) -> bool:
    """Whether this is a host name. To a resolver in C a NUL ends a name and a backslash joins labels."""
    return len(name) <= 253 and _HOST.fullmatch(name) is not None


def entry(text: str) -> Entry:
    """Raises ValueError, which says what is wrong with it."""
    lowered = text.strip().lower()
    host, port = _split(lowered)
    found = _range(host)
    if found is not None:
        for block in _NEVER:
            if _within(found, block):
                raise ValueError(f"{text!r} is never reached from a sandbox (it is in {block})")
        shown = str(found) if found.num_addresses > 1 else str(found.network_address)
        bracketed = f"[{shown}]" if port is not None and found.version == 6 else shown
        return Entry(text=_with_port(bracketed, port), range=found, port=port)
    below = host.startswith("*.")
    name = host.removeprefix("*.").rstrip(".")
    _check_name(text, name)
    return Entry(text=_with_port(f"*.{name}" if below else name, port), name=name, below=below, port=port)


def _split(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} has no closing bracket before its port")
        return host, _port(text, rest[1:]) if rest else None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, _port(text, port)
    return text, None


def _port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} has no port between 1 and 65535 after its colon")
    return int(port)


def _range(host: str) -> Range | None:
    try:
        return ip_network(host)
    except ValueError:
        pass
    try:
        wide = ip_network(host, strict=False)
    except ValueError:
        if "/" in host or ":" in host:
            raise ValueError(f"{host!r} is no range of addresses, such as 10.1.2.0/24") from None
        return None
    raise ValueError(f"{host!r} is in the middle of a range; write {wide}, or the address alone")


def _check_name(text: str, name: str) -> None:
    if name == "*" or not name:
        raise ValueError(f"{text!r} allows everything; use network='internet' for the public internet")
    labels = name.split(".")
    if not name.isascii():
        raise ValueError(f"{text!r} is not in ASCII; write its xn-- form")
    if "*" in name:
        raise ValueError(f"{text!r} has its wildcard in the middle; only a leading '*.' is understood")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r} is no host name, '*.' and a host name, address or range")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{text!r} is a number and no name; write an address as 10.1.2.3")
    if labels[-1] == "localhost":
        raise ValueError(f"{text!r} is this machine, which is never reached from a sandbox")


def _with_port(host: str, port: int | None) -> str:
    return host if port is None else f"{host}:{port}"


def _never(address: Address) -> bool:
    return any(address in block for block in _NEVER)


def _within(inner: Range, outer: Range) -> bool:
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)


def address_of(text: str) -> Address:
    return plain(ip_address(text.partition("%")[0]))
