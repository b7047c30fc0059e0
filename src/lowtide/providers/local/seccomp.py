"""The system-call filter: what no process in a sandbox may ask of the kernel.

A deny-list: programs keep working, and what has let code out of containers before (new namespaces,
mounts, tracing, keyrings, bpf, io_uring, handles, odd socket families) is answered with an error.
bwrap loads these bytes for the first process and the spawner for everything that enters later.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip

_DENIED_X86_64 = {
    "ptrace": 101, "syslog": 103, "uselib": 134, "vhangup": 153, "pivot_root": 155, "_sysctl": 156,
    "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166,
    "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172,
    "ioperm": 173, "create_module": 174, "init_module": 175, "delete_module": 176, "get_kernel_syms": 177,
    "query_module": 178, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212, "clock_settime": 227,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "move_pages": 279,
    "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip

_DENIED_AARCH64 = {
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42, "chroot": 51,
    "vhangup": 58, "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105,
    "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142,
    "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171, "add_key": 217,
    "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "move_pages": 239,
    "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    audit_arch: int
    denied: Mapping[str, int]
    clone: int
    ioctl: int
    personality: int
    socket: int


_MACHINES = {
    "x86_64": _Machine(
        audit_arch=0xC000003E, denied=_DENIED_X86_64, clone=56, ioctl=16, personality=135, socket=41
    ),
    "aarch64": _Machine(
        audit_arch=0xC00000B7, denied=_DENIED_AARCH64, clone=220, ioctl=29, personality=92, socket=198
    ),
}

_CLONE3 = 435
_CLONE_NEW_ANY = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# Unix, IPv4, IPv6, netlink. Others are old, odd, or (vsock) reach past the network namespace.
_FAMILIES = (1, 2, 10, 16)
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
    target = _MACHINES[machine or os.uname().machine]
    program = _Program()
    program.load(_ARCH)
    program.when(_EQUAL, target.audit_arch, otherwise="kill")
    program.load(_NUMBER)
    program.when(_AT_LEAST, _X32, then="missing")
    for number in sorted({**_DENIED_EVERYWHERE, **target.denied}.values()):
        program.when(_EQUAL, number, then="refuse")
    # Its flags are behind a pointer no filter can follow; libc falls back to clone.
    program.when(_EQUAL, _CLONE3, then="missing")
    program.when(_EQUAL, target.clone, then="clone")
    program.when(_EQUAL, target.ioctl, then="ioctl")
    program.when(_EQUAL, target.socket, then="socket")
    program.when(_EQUAL, target.personality, then="personality", otherwise="allow")
    program.label("clone")
    program.load(_argument(0))
    program.when(_ANY_BIT, _CLONE_NEW_ANY, then="refuse", otherwise="allow")
    program.label("ioctl")
    program.load(_argument(1))
    program.when(_EQUAL, _TIOCSTI, then="refuse")
    program.when(_EQUAL, _TIOCLINUX, then="refuse", otherwise="allow")
    program.label("socket")
    program.load(_argument(0))
    for family in _FAMILIES:
        program.when(_EQUAL, family, then="allow")
    program.give("family", _ERROR | errno.EAFNOSUPPORT)
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
