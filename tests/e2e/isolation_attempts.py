"""Attempts to get out: how a test runs hostile code in a local sandbox and what it compares on the host."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lowtide import Sandbox

ANSWER_SECONDS = 120.0

_PREAMBLE = """
import ctypes, errno, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": dict(mount=165, umount2=166, pivot_root=155, chroot=161, unshare=272, setns=308, ptrace=101,
        process_vm_readv=310, process_vm_writev=311, add_key=248, request_key=249, keyctl=250, bpf=321,
        perf_event_open=298, kexec_load=246, init_module=175, finit_module=313, delete_module=176, reboot=169,
        swapon=167, swapoff=168, userfaultfd=323, io_uring_setup=425, open_by_handle_at=304,
        name_to_handle_at=303, acct=163, quotactl=179, fsopen=430, fsmount=432, move_mount=429, open_tree=428,
        mount_setattr=442, syslog=103, clone=56, clone3=435, sethostname=170, setdomainname=171,
        settimeofday=164, clock_settime=227, iopl=172, ioperm=173, personality=135, mknod=133, kcmp=312,
        fanotify_init=300, lookup_dcookie=212, vhangup=153, nfsservctl=180),
    "aarch64": dict(mount=40, umount2=39, pivot_root=41, chroot=51, unshare=97, setns=268, ptrace=117,
        process_vm_readv=270, process_vm_writev=271, add_key=217, request_key=218, keyctl=219, bpf=280,
        perf_event_open=241, kexec_load=104, init_module=105, finit_module=273, delete_module=106, reboot=142,
        swapon=224, swapoff=225, userfaultfd=282, io_uring_setup=425, open_by_handle_at=265,
        name_to_handle_at=264, acct=89, quotactl=60, fsopen=430, fsmount=432, move_mount=429, open_tree=428,
        mount_setattr=442, syslog=116, clone=220, clone3=435, sethostname=161, setdomainname=162,
        settimeofday=170, clock_settime=112, personality=92, fanotify_init=262, vhangup=58),
}[platform.machine()]

def syscall(name, *arguments):
    '''(result, errno name or None)'''
    number = NUMBERS.get(name)
    if number is None:
        return -1, "ENOSYS"
    ctypes.set_errno(0)
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    return result, (errno.errorcode[ctypes.get_errno()] if result < 0 else None)
"""


def attempt(box: Sandbox, code: str, *arguments: str, user: str | None = None, seconds: float = 60.0) -> str:
    """Run Python code in the sandbox; what it printed. The code has `syscall(name, ...)`."""
    process = box.exec(["python3", "-c", _PREAMBLE + code, *arguments], user=user, timeout_seconds=seconds)
    result = process.result(ANSWER_SECONDS)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(box: Sandbox, *call: object, user: str | None = None) -> bool:
    """Whether the kernel refuses a system call as not permitted or not existing (rather than as clumsy)."""
    rest = ", ".join(repr(part) for part in call)
    answer = attempt(box, f"print(*syscall({rest}))", user=user).split()
    return answer[0] == "-1" and answer[1] in {
        errno.errorcode[number] for number in (errno.EPERM, errno.EACCES, errno.ENOSYS)
    }


def inside_file(box: Sandbox, path: str) -> str:
    return box.exec(["cat", path]).result(ANSWER_SECONDS).stdout


class HostHealth:
    """What a sandbox must never change, looked at before and after."""

    _SETTINGS = (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/fs/file-max",
    )

    def __init__(self) -> None:
        self.before = self._look()

    def _look(self) -> dict[str, str]:
        return {path: Path(path).read_text() for path in self._SETTINGS if os.path.exists(path)}

    def check(self) -> None:
        assert self._look() == self.before
        # A machine that cannot start a process is not healthy.
        pid = os.posix_spawn("/bin/true", ["true"], {})
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
