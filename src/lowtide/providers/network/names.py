"""Names inside a sandbox: the address that stands for each, and answers to DNS queries. No I/O."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from lowtide.providers.network.policy import STAND_INS, Address

NAMESERVER = STAND_INS[1]  # any address in there would do: every query is redirected
# The first line tells the hint for pip (local/python_environment.py) what the sandbox may reach.
RESOLVER_FILES = {
    "allow": f"# lowtide: names of this sandbox's allow-list\nnameserver {NAMESERVER}\n".encode(),
    "internet": f"# lowtide: names of the public internet\nnameserver {NAMESERVER}\n".encode(),
}
_FIRST = 256  # the first of those that stand for names
_MOST = 16_384
_TTL_SECONDS = 60
_A, _AAAA, _INTERNET = 1, 28, 1
_MOST_ADDRESSES = 8  # in one answer, so that it fits into a datagram
_RESPONSE, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x8000, 0x0100, 0x0080
_REPORTED = 0x7800  # the operation code
NO_ERROR, SERVER_FAILURE, NO_SUCH_NAME = 0, 2, 3


class StandIns:
    """Which address stands for which name. The oldest are forgotten, and a number comes back only after all others."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, IPv4Address] = OrderedDict()
        self._addresses: dict[IPv4Address, str] = {}
        self._next = _FIRST

    def of(self, name: str) -> IPv4Address:
        known = self._names.get(name)
        if known is not None:
            self._names.move_to_end(name)
            return known
        while (address := STAND_INS[self._next]) in self._addresses:
            self._step()
        self._step()
        self._names[name] = address
        self._addresses[address] = name
        if len(self._names) > _MOST:
            _, oldest = self._names.popitem(last=False)
            del self._addresses[oldest]
        return address

    def name(self, address: IPv4Address) -> str | None:
        return self._addresses.get(address)

    def _step(self) -> None:
        self._next += 1
        if self._next >= STAND_INS.num_addresses:
            self._next = _FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question of one DNS message."""

    number: int
    flags: int
    question: bytes
    name: str
    kind: int

    @property
    def wants_ipv4(self) -> bool:
        return self.kind == _A

    @property
    def wants_ipv6(self) -> bool:
        return self.kind == _AAAA


def query(data: bytes) -> Query | None:
    """None: it is no plain question, and nobody answers it."""
    if not 12 < len(data) <= 4096:
        return None
    number, flags, questions = struct.unpack_from(">HHH", data)
    if flags & (_RESPONSE | _REPORTED) or questions != 1:
        return None
    labels, at = [], 12
    while at < len(data) and (length := data[at]):
        if length > 63 or at + 1 + length >= len(data):
            return None
        labels.append(data[at + 1 : at + 1 + length])
        at += 1 + length
    if at + 5 > len(data) or at - 12 > 254:
        return None
    kind, family = struct.unpack_from(">HH", data, at + 1)
    if family != _INTERNET:
        return None
    # A dot or a strange byte inside a label is no name that a list can have.
    name = ".".join(label.decode("latin-1").replace(".", "\\").lower() for label in labels)
    return Query(number=number, flags=flags, question=data[12 : at + 5], name=name, kind=kind)


def answer(asked: Query, code: int, addresses: Sequence[Address] = ()) -> bytes:
    """With NO_ERROR and no address: the name is there, and has nothing of this kind."""
    flags = _RESPONSE | _RECURSION_AVAILABLE | (asked.flags & _RECURSION_DESIRED) | code
    records = [
        struct.pack(">HHHIH", 0xC00C, asked.kind, _INTERNET, _TTL_SECONDS, len(address.packed))
        + address.packed
        for address in addresses[:_MOST_ADDRESSES]
    ]
    head = struct.pack(">HHHHHH", asked.number, flags, 1, len(records), 0, 0)
    return head + asked.question + b"".join(records)
