"""A sandbox's own network: routes and redirections in its namespace, and listeners that are served from outside.

The namespace has no device but its loopback, so nothing leaves it whatever is set up here. The routes make every
address local, and one rule of nf_tables turns every TCP connection into one to the listener; the kernel remembers
where it was meant to go, and the proxy decides. A rule for UDP port 53 does the same for DNS queries. Any other
datagram meets a closed port and is refused at once; a tap shows the proxy where it was meant to go.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable
from ipaddress import IPv4Network, ip_address, ip_network

from lowtide.providers.network.policy import Address, Range

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_SET_DUMPABLE = 4
_BACKLOG = 128

# Packet sockets, and the filters of the taps: (code, jump if true, jump if false, value)
_ETHERNET_IPV4, _ETHERNET_IPV6 = 0x0800, 0x86DD
_ATTACH_FILTER, _TAP_BYTES = 26, 1 << 16
_BYTE, _HALF, _WORD, _HALF_AFTER_HEAD, _HEAD_LENGTH = 0x30, 0x28, 0x20, 0x48, 0xB1
_IF_EQUAL, _IF_BITS, _RETURN = 0x15, 0x45, 0x06
_TAP_IPV4: tuple[tuple[int, int, int, int], ...] = (
    (_BYTE, 0, 0, 9),  # the protocol
    (_IF_EQUAL, 0, 8, 17),
    (_HALF, 0, 0, 6),  # the offset of a fragment: later ones have no ports
    (_IF_BITS, 6, 0, 0x1FFF),
    (_BYTE, 0, 0, 16),  # the target's first byte
    (_IF_EQUAL, 4, 0, 127),
    (_HEAD_LENGTH, 0, 0, 0),
    (_HALF_AFTER_HEAD, 0, 0, 0),  # the source's port
    (_IF_EQUAL, 1, 0, 53),
    (_RETURN, 0, 0, 68),
    (_RETURN, 0, 0, 0),
)
_TAP_IPV6: tuple[tuple[int, int, int, int], ...] = (
    (_BYTE, 0, 0, 6),
    (_IF_EQUAL, 0, 11, 17),
    (_HALF, 0, 0, 40),
    (_IF_EQUAL, 9, 0, 53),
    (_WORD, 0, 0, 24),  # the target: all of ::1
    (_IF_EQUAL, 0, 6, 0),
    (_WORD, 0, 0, 28),
    (_IF_EQUAL, 0, 4, 0),
    (_WORD, 0, 0, 32),
    (_IF_EQUAL, 0, 2, 0),
    (_WORD, 0, 0, 36),
    (_IF_EQUAL, 1, 0, 1),
    (_RETURN, 0, 0, 48),
    (_RETURN, 0, 0, 0),
)

# rtnetlink
_NEWROUTE, _LOCAL_TABLE, _STATIC, _HOST_SCOPE, _LOCAL = 24, 255, 4, 254, 2
_ROUTE_TO, _ROUTE_BY = 1, 4
_REQUEST, _ACKNOWLEDGE, _REPLACE, _CREATE, _APPEND = 0x1, 0x4, 0x100, 0x400, 0x800
_ERROR = 2

# nfnetlink and nf_tables
_NETLINK_ROUTE, _NETLINK_NETFILTER, _NFTABLES = 0, 12, 10
_BATCH_BEGIN, _BATCH_END, _NEWTABLE, _NEWCHAIN, _NEWRULE = 0x10, 0x11, 0, 3, 6
_IPV4, _IPV6 = 2, 10
_OUTPUT, _NAT_PRIORITY = 3, -100
_REGISTER = 1
_EQUAL, _NOT_EQUAL = 0, 1
_NETWORK_HEADER, _TRANSPORT_HEADER, _META_PROTOCOL = 1, 2, 16
_TCP, _UDP, _DNS_PORT = 6, 17, 53
_TABLE = b"lowtide\0"
_CHAIN = b"output\0"


class Listeners:
    """Sockets of the sandbox's network: connections, DNS queries by UDP, and taps for refused datagrams."""

    __slots__ = ("queries", "streams", "taps")

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.taps = [s for s in sockets if s.family == socket.AF_PACKET]
        internet = [s for s in sockets if s.family != socket.AF_PACKET]
        self.streams = [s for s in internet if s.type == socket.SOCK_STREAM]
        self.queries = [s for s in internet if s.type == socket.SOCK_DGRAM]


def listen(pidfd: int, *, own_user: bool, needs_ipv6: bool) -> Listeners:
    """Set up the network of that process. `own_user`: it belongs to a user namespace, whose rights it takes.

    Without `needs_ipv6`, a kernel without IPv6 is no reason to fail.

    A child does it and hands the sockets out, so that this process never leaves its own network.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            _hand_out(theirs, lambda: _prepare(pidfd, own_user, needs_ipv6))
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        said, handles, _, _ = socket.recv_fds(ours, 4096, 8)
        os.waitpid(child, 0)
    if not said.startswith(b"ok"):
        code, _, why = said.decode("utf-8", "replace").partition(" ")
        raise OSError(
            int(code) if code.isdigit() else errno.EIO, why or "the set-up of the network was killed"
        )
    return Listeners([socket.socket(fileno=handle) for handle in handles])


def _hand_out(to: socket.socket, work: Callable[[], list[socket.socket]]) -> None:
    try:
        made = work()
        handles = array.array("i", [s.fileno() for s in made])
        to.sendmsg([b"ok"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
    except OSError as error:
        to.send(f"{error.errno or errno.EIO} {error.strerror or error}".encode())


def _prepare(pidfd: int, own_user: bool, needs_ipv6: bool) -> list[socket.socket]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.setns(pidfd, (_NEWUSER if own_user else 0) | _NEWNET) < 0:
        raise OSError(ctypes.get_errno(), "the sandbox's network cannot be entered")
    made = _serve(socket.AF_INET)
    try:
        made += _serve(socket.AF_INET6)
    except OSError:
        if needs_ipv6:
            raise
    return made


def _serve(family: socket.AddressFamily) -> list[socket.socket]:
    """Every address of the family is local, and connections and DNS queries come to our sockets."""
    here = "127.0.0.1" if family == socket.AF_INET else "::1"
    with _Netlink(_NETLINK_ROUTE, "a route") as routes:
        everything = ip_network("0.0.0.0/0" if family == socket.AF_INET else "::/0")
        routes.ask(_NEWROUTE, _REPLACE | _CREATE, _route(everything, socket.if_nametoindex("lo")))
    streams = socket.socket(family, socket.SOCK_STREAM)
    streams.bind((here, 0))
    streams.listen(_BACKLOG)
    queries = socket.socket(family, socket.SOCK_DGRAM)
    queries.bind((here, 0))
    _redirect(family, streams.getsockname()[1], queries.getsockname()[1])
    return [streams, queries, *_tap(family)]


def _tap(family: socket.AddressFamily) -> list[socket.socket]:
    """A copy of the head of each datagram that leaves the loopback's own addresses. None where the kernel has none.

    A redirected query goes to the loopback, so that only its answer, from port 53, has to be left out.
    """
    ipv4 = family == socket.AF_INET
    protocol, program = (_ETHERNET_IPV4 if ipv4 else _ETHERNET_IPV6), _TAP_IPV4 if ipv4 else _TAP_IPV6
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    held = ctypes.create_string_buffer(code, len(code))
    try:
        # Of one protocol: such a socket sees what arrives, and so each datagram once.
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(protocol))
    except OSError:
        return []
    tap.setsockopt(
        socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(held))
    )
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TAP_BYTES)
    tap.bind(("lo", protocol))
    return [tap]


def refused_datagram(packet: bytes) -> tuple[Address, int] | None:
    """Where a datagram from a tap was meant to go."""
    if packet[:1] and packet[0] >> 4 == 4:
        head, at = (packet[0] & 15) * 4, slice(16, 20)
    else:
        head, at = 40, slice(24, 40)
    if len(packet) < head + 4:
        return None
    return ip_address(packet[at]), struct.unpack_from(">H", packet, head + 2)[0]


def _route(range_: Range, device: int) -> bytes:
    family = _IPV4 if isinstance(range_, IPv4Network) else _IPV6
    head = struct.pack(
        "=BBBBBBBBI", family, range_.prefixlen, 0, 0, _LOCAL_TABLE, _STATIC, _HOST_SCOPE, _LOCAL, 0
    )
    to = _attribute(_ROUTE_TO, range_.network_address.packed) if range_.prefixlen else b""
    return head + to + _attribute(_ROUTE_BY, struct.pack("=I", device))


def _redirect(family: socket.AddressFamily, streams: int, queries: int) -> None:
    """Everything but what goes to the loopback itself, which is the sandbox's own."""
    if family == socket.AF_INET:
        number, offset, mask, own = _IPV4, 16, b"\xff\0\0\0", b"\x7f\0\0\0"
    else:
        number, offset, mask, own = _IPV6, 24, b"\xff" * 16, bytes(15) + b"\1"
    elsewhere = (
        _expression(
            "payload",
            (1, _big(_REGISTER)),
            (2, _big(_NETWORK_HEADER)),
            (3, _big(offset)),
            (4, _big(len(mask))),
        )
        + _expression(
            "bitwise",
            (1, _big(_REGISTER)),
            (2, _big(_REGISTER)),
            (3, _big(len(mask))),
            (4, _attribute(1, mask)),
            (5, _attribute(1, bytes(len(mask)))),
        )
        + _compare(_NOT_EQUAL, own)
    )
    port = _expression(
        "payload", (1, _big(_REGISTER)), (2, _big(_TRANSPORT_HEADER)), (3, _big(2)), (4, _big(2))
    ) + _compare(_EQUAL, struct.pack(">H", _DNS_PORT))
    rules = (
        elsewhere + _protocol(_TCP) + _to(streams),
        elsewhere + _protocol(_UDP) + port + _to(queries),
    )
    hook = _attribute(1, _big(_OUTPUT)) + _attribute(2, struct.pack(">i", _NAT_PRIORITY))
    chain = _attribute(1, _TABLE) + _attribute(3, _CHAIN) + _nested(4, hook) + _attribute(7, b"nat\0")
    messages = [
        (_NEWTABLE, _CREATE, _attribute(1, _TABLE)),
        (_NEWCHAIN, _CREATE, chain),
        *(
            (_NEWRULE, _CREATE | _APPEND, _attribute(1, _TABLE) + _attribute(2, _CHAIN) + _nested(4, rule))
            for rule in rules
        ),
    ]
    with _Netlink(_NETLINK_NETFILTER, "a redirection (nf_tables)") as tables:
        tables.batch(number, messages)


def _protocol(number: int) -> bytes:
    return _expression("meta", (1, _big(_REGISTER)), (2, _big(_META_PROTOCOL))) + _compare(
        _EQUAL, bytes([number])
    )


def _to(port: int) -> bytes:
    value = _nested(2, _attribute(1, struct.pack(">H", port)))
    return _expression("immediate", (1, _big(_REGISTER)), raw=value) + _expression(
        "redir", (1, _big(_REGISTER))
    )


def _compare(operation: int, value: bytes) -> bytes:
    return _expression(
        "cmp", (1, _big(_REGISTER)), (2, _big(operation)), raw=_nested(3, _attribute(1, value))
    )


def _expression(name: str, *fields: tuple[int, bytes], raw: bytes = b"") -> bytes:
    inner = b"".join(
        _nested(kind, value) if name == "bitwise" and kind in (4, 5) else _attribute(kind, value)
        for kind, value in fields
    )
    return _nested(1, _attribute(1, name.encode() + b"\0") + _nested(2, inner + raw))


def _big(value: int) -> bytes:
    return struct.pack(">I", value)


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)


def _nested(kind: int, value: bytes) -> bytes:
    return _attribute(kind | 0x8000, value)


class _Netlink:
    """One conversation with the kernel. What it refuses is an OSError that says what was asked for."""

    def __init__(self, protocol: int, what: str) -> None:
        self._what = what
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        except OSError as error:
            raise self._refused(error.errno or errno.EIO) from None
        self._socket.settimeout(10.0)
        self._number = 0

    def __enter__(self) -> _Netlink:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, kind: int, flags: int, body: bytes) -> None:
        self._socket.send(self._message(kind, _REQUEST | _ACKNOWLEDGE | flags, body))
        self._answers(1)

    def batch(self, family: int, messages: list[tuple[int, int, bytes]]) -> None:
        """All or nothing."""
        edge = struct.pack(">BBH", 0, 0, _NFTABLES)
        parts = [self._message(_BATCH_BEGIN, _REQUEST, edge)]
        for kind, flags, body in messages:
            head = struct.pack(">BBH", family, 0, 0)
            parts.append(self._message(_NFTABLES << 8 | kind, _REQUEST | _ACKNOWLEDGE | flags, head + body))
        parts.append(self._message(_BATCH_END, _REQUEST, edge))
        self._socket.send(b"".join(parts))
        self._answers(len(messages))

    def _message(self, kind: int, flags: int, body: bytes) -> bytes:
        self._number += 1
        return struct.pack("=IHHII", 16 + len(body), kind, flags, self._number, 0) + body

    def _answers(self, count: int) -> None:
        while count > 0:
            data = self._socket.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", data, 16)[0]
                    if code:
                        raise self._refused(code)
                    count -= 1
                data = data[(length + 3) & ~3 :]

    def _refused(self, code: int) -> OSError:
        return OSError(code, f"the kernel refuses {self._what}: {os.strerror(code)}")
