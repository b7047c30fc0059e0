"""Entering a sandbox, and becoming no more than its first process is.

What enters a sandbox imports, looks up and loads nothing from then on: files in there are hostile.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys

from .config import config
from .kernel import (
    PR_CAP_AMBIENT,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_SECCOMP,
    SYS_CAPSET,
    check,
    libc,
    put,
)


def enter(pidfd: int, cgroups: list[str], flags: int) -> None:
    sys.meta_path.clear()  # no module can be loaded any more: it would come from the sandbox
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for procs in cgroups:
        put(procs, b"0")
    if config.base is not None:
        os.setgroups([])
    check(libc.setns(pidfd, flags), "enter the sandbox")


def restrict(uid: int, gid: int, nproc: int, *, runs_nothing: bool = False) -> None:
    """Become what the sandbox's first process is: its ids, no capabilities, its limits, its filter.

    What runs nothing of the sandbox keeps this program's own limit of descriptors, which is above every sandbox's:
    the kernel compares it with how many descriptors the user has under way in messages, hostile ones included.
    """
    if runs_nothing:
        inherited_limits()
    else:
        first_limits()
    if nproc:
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        if hard != resource.RLIM_INFINITY:
            nproc = min(nproc, hard)  # as the first process: a user who may have fewer has fewer there, too
        resource.setrlimit(resource.RLIMIT_NPROC, (nproc, nproc))
    libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)  # clear all
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    header, none = struct.pack("II", 0x20080522, 0), bytes(24)
    check(libc.syscall(SYS_CAPSET, header, none), "drop capabilities")
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    if config.program is not None:
        check(libc.prctl(PR_SET_SECCOMP, 2, config.program, 0, 0), "seccomp")


def first_limits() -> None:
    """What every process of a sandbox gets, the first one and those that enter later."""
    inherited_limits()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, config.descriptors), config.descriptors))


def inherited_limits() -> None:
    # 1: not even to a piped core handler of the host. A user whose most is 0 cannot have that; see `inheritance`.
    core = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (core, core))
    os.umask(0o022)


def default_signals() -> None:
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
        signal.SIGCHLD,
        signal.SIGALRM,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
