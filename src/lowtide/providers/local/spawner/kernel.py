"""What the C library and the kernel offer that Python does not name: numbers, flags, one checked call."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET, CLONE_PARENT = 0x10000000, 0x20000000, 0x40000000, 0x8000
CLONE_VM = 0x100
MACHINE = os.uname().machine
SYS_CLONE = 56 if MACHINE == "x86_64" else 220
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
SYS_KEYCTL = 250 if MACHINE == "x86_64" else 219
SYS_CAPSET = 126 if MACHINE == "x86_64" else 91
SYS_CLOSE_RANGE = 436
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAP_AMBIENT = 4, 24, 38, 22, 47
AT_EMPTY_PATH = 0x1000
TIOCGPTPEER, TIOCSPTLCK = 0x5441, 0x40045431


def check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def put(path: str, data: bytes, flags: int = os.O_WRONLY) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
