"""The system-call filter: what no process in a sandbox may ask of the kernel, as the bytes the kernel takes.

A deny-list (`system_calls` is its table): programs keep working, and what has let code out of containers before is
answered with an error. bwrap loads these bytes for the first process and the spawner for everything that enters later.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

from lowtide.providers.local import system_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    audit_arch: int
    clone: int
    ioctl: int
    personality: int
    socket: int
    socketpair: int
    setsockopt: int
    mmap: int
    memfd_create: int
    shmget: int


_MACHINES = {
    "x86_64": _Machine(
        audit_arch=0xC000003E,
        clone=56,
        ioctl=16,
        personality=135,
        socket=41,
        socketpair=53,
        setsockopt=54,
        mmap=9,
        memfd_create=319,
        shmget=29,
    ),
    "aarch64": _Machine(
        audit_arch=0xC00000B7,
        clone=220,
        ioctl=29,
        personality=92,
        socket=198,
        socketpair=199,
        setsockopt=208,
        mmap=222,
        memfd_create=279,
        shmget=194,
    ),
}

_CLONE3 = 435
_CLONE_NEW_ANY = 0x7E020000
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_UNIX, _IPV4, _IPV6, _NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0
_DCCP, _L2TP, _SCTP, _MPTCP = 33, 115, 132, 262
_SOL_SOCKET = 1
_ATTACH_FILTER, _ATTACH_BPF, _ATTACH_REUSEPORT_CBPF, _ATTACH_REUSEPORT_EBPF = 26, 50, 51, 52
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH = 0, 4


def _argument(index: int) -> int:
    return 16 + 8 * index  # the low half: flags, requests and families are 32 bits wide


def supported(machine: str | None = None) -> bool:
    return (machine or os.uname().machine) in _MACHINES


def filter_bytes(machine: str | None = None) -> bytes:
    """The filter as an array of struct sock_filter."""
    name = machine or os.uname().machine
    target = _MACHINES[name]
    program = _Program()
    program.load(_ARCH)
    program.when(_EQUAL, target.audit_arch, otherwise="kill")
    program.load(_NUMBER)
    program.when(_AT_LEAST, _X32, then="missing")
    answers = {errno.EPERM: "refuse", errno.ENOSYS: "missing"}
    for number, answer in sorted((number, answer) for _, number, answer in system_calls.refused(name)):
        program.when(_EQUAL, number, then=answers[answer])
    # Its flags are behind a pointer no filter can follow; libc falls back to clone.
    program.when(_EQUAL, _CLONE3, then="missing")
    program.when(_EQUAL, target.clone, then="clone")
    program.when(_EQUAL, target.ioctl, then="ioctl")
    program.when(_EQUAL, target.socket, then="socket")
    program.when(_EQUAL, target.socketpair, then="socketpair")
    program.when(_EQUAL, target.setsockopt, then="setsockopt")
    program.when(_EQUAL, target.mmap, then="mmap")
    program.when(_EQUAL, target.memfd_create, then="memfd_create")
    program.when(_EQUAL, target.shmget, then="shmget")
    program.when(_EQUAL, target.personality, then="personality", otherwise="allow")
    program.label("clone")
    program.load(_argument(0))
    program.when(_ANY_BIT, _CLONE_NEW_ANY, then="refuse", otherwise="allow")
    program.label("ioctl")
    program.load(_argument(1))
    for request in (_TIOCSTI, _TIOCLINUX):
        program.when(_EQUAL, request, then="refuse")
    program.when(_EQUAL, _TIOCSETD, then="refuse", otherwise="allow")
    program.label("socket")
    program.load(_argument(0))
    program.when(_EQUAL, _UNIX, then="allow")
    for family in (_IPV4, _IPV6):
        program.when(_EQUAL, family, then="internet")
    program.when(_EQUAL, _NETLINK, otherwise="family")
    program.load(_argument(2))
    program.when(_EQUAL, _NETLINK_ROUTE, then="allow", otherwise="protocol")
    program.label("internet")
    program.load(_argument(2))
    for protocol in (_DCCP, _L2TP, _SCTP):
        program.when(_EQUAL, protocol, then="protocol")
    program.when(_EQUAL, _MPTCP, then="protocol", otherwise="allow")
    program.label("socketpair")
    program.load(_argument(0))
    program.when(_EQUAL, _UNIX, then="allow")
    program.give("family", _ERROR | errno.EAFNOSUPPORT)
    program.give("protocol", _ERROR | errno.EPROTONOSUPPORT)
    program.label("setsockopt")
    program.load(_argument(1))
    program.when(_EQUAL, _SOL_SOCKET, otherwise="allow")
    program.load(_argument(2))
    for option in (_ATTACH_FILTER, _ATTACH_BPF, _ATTACH_REUSEPORT_CBPF):
        program.when(_EQUAL, option, then="refuse")
    program.when(_EQUAL, _ATTACH_REUSEPORT_EBPF, then="refuse", otherwise="allow")
    program.label("mmap")
    program.load(_argument(3))
    program.when(_ANY_BIT, _MAP_HUGETLB, then="refuse", otherwise="allow")
    program.label("memfd_create")
    program.load(_argument(1))
    program.when(_ANY_BIT, _MFD_HUGETLB, then="refuse", otherwise="allow")
    program.label("shmget")
    program.load(_argument(2))
    program.when(_ANY_BIT, _SHM_HUGETLB, then="refuse", otherwise="allow")
    program.label("personality")
    program.load(_argument(0))
    program.when(_EQUAL, 0, then="allow")
    program.when(_EQUAL, 0xFFFFFFFF, then="allow", otherwise="refuse")
    program.give("refuse", _ERROR | errno.EPERM)
    program.give("missing", _ERROR | errno.ENOSYS)
    program.give("kill", _KILL_PROCESS)
    program.give("allow", _ALLOW)
    return program.assemble()


class _Program:
    """Instructions with named jumps; classic BPF only jumps forward and at most 255 far."""

    def __init__(self) -> None:
        self._code: list[tuple[int, str | None, str | None, int]] = []
        self._labels: dict[str, int] = {}

    def load(self, offset: int) -> None:
        self._code.append((_LOAD, None, None, offset))

    def when(self, test: int, value: int, *, then: str | None = None, otherwise: str | None = None) -> None:
        self._code.append((test, then, otherwise, value))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def give(self, name: str, value: int) -> None:
        self.label(name)
        self._code.append((_RETURN, None, None, value))

    def assemble(self) -> bytes:
        out = bytearray()
        for at, (code, then, otherwise, value) in enumerate(self._code):
            jumps = [self._labels[name] - at - 1 if name else 0 for name in (then, otherwise)]
            out += struct.pack("HBBI", code, *jumps, value)
        return bytes(out)
