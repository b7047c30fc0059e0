"""A sandbox's own network: routes and redirections in its namespace, and listeners that are served from outside.

The namespace has no device but its loopback, so nothing leaves it whatever is set up here. The routes make the
addresses of the allow-list local, and one rule of nf_tables turns every connection to them into one to the
listener; the kernel remembers where it was meant to go. Anything else is unreachable at once.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network

from lowtide.providers.network.policy import STAND_INS, Range

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_SET_DUMPABLE = 4
_BACKLOG = 128

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
    """Sockets of the sandbox's network: connections, and DNS queries by UDP."""

    __slots__ = ("queries", "streams")

    def __init__(self, streams: list[socket.socket], queries: list[socket.socket]) -> None:
        self.streams, self.queries = streams, queries


def listen(pidfd: int, ranges: tuple[Range, ...], *, own_user: bool) -> Listeners:
    """Set up the network of that process. `own_user`: it belongs to a user namespace, whose rights it takes.

    A child does it and hands the sockets out, so that this process never leaves its own network.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            _hand_out(theirs, lambda: _prepare(pidfd, ranges, own_user))
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        said, handles, _, _ = socket.recv_fds(ours, 4096, 4)
        os.waitpid(child, 0)
    if not said.startswith(b"ok"):
        code, _, why = said.decode("utf-8", "replace").partition(" ")
        raise OSError(
            int(code) if code.isdigit() else errno.EIO, why or "the set-up of the network was killed"
        )
    sockets = [socket.socket(fileno=handle) for handle in handles]
    return Listeners(
        [s for s in sockets if s.type == socket.SOCK_STREAM],
        [s for s in sockets if s.type == socket.SOCK_DGRAM],
    )


def _hand_out(to: socket.socket, work: Callable[[], list[socket.socket]]) -> None:
    try:
        made = work()
        handles = array.array("i", [s.fileno() for s in made])
        to.sendmsg([b"ok"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
    except OSError as error:
        to.send(f"{error.errno or errno.EIO} {error.strerror or error}".encode())


def _prepare(pidfd: int, ranges: tuple[Range, ...], own_user: bool) -> list[socket.socket]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.setns(pidfd, (_NEWUSER if own_user else 0) | _NEWNET) < 0:
        raise OSError(ctypes.get_errno(), "the sandbox's network cannot be entered")
    families = [socket.AF_INET]
    if any(isinstance(range_, IPv6Network) for range_ in ranges):
        families.append(socket.AF_INET6)
    loopback = socket.if_nametoindex("lo")
    with _Netlink(_NETLINK_ROUTE, "a route") as routes:
        for range_ in dict.fromkeys((STAND_INS, *ranges)):
            routes.ask(_NEWROUTE, _REPLACE | _CREATE, _route(range_, loopback))
    made = []
    for family in families:
        here = "127.0.0.1" if family == socket.AF_INET else "::1"
        streams = socket.socket(family, socket.SOCK_STREAM)
        streams.bind((here, 0))
        streams.listen(_BACKLOG)
        queries = socket.socket(family, socket.SOCK_DGRAM)
        queries.bind((here, 0))
        _redirect(family, streams.getsockname()[1], queries.getsockname()[1])
        made += [streams, queries]
    return made


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
