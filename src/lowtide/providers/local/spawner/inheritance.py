"""What a process gets from the one that started it and no sandbox shall have: priorities, signals, limits, keys.

The spawner lays all of it down once, at its start. Everything in its sandboxes descends from it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct

from .config import config
from .kernel import MACHINE, SYS_KEYCTL, libc, put

SYS_IOPRIO_SET = 251 if MACHINE == "x86_64" else 30
SYS_RT_SIGACTION = 13 if MACHINE == "x86_64" else 134
PR_SET_TIMERSLACK = 29
JOIN_SESSION_KEYRING = 1
STACK_BYTES = 8 << 20
# The C library keeps these two for its threads and lets no program set them. Its posix_spawn() starts a command in a
# sandbox with them ignored; newer ones (glibc 2.43) start the spawner itself with the default. A command that starts by
# fork() inherits them from here, and a sandbox's first command would differ from the later ones.
_C_LIBRARY_SIGNALS = (32, 33)
_IGNORE = struct.pack("4Q", signal.SIG_IGN, 0, 0, 0)  # the kernel's sigaction: handler, flags, restorer, mask
DESCRIPTORS = 65_536
_NICE, _REALTIME_PRIORITY = 13, 14  # RLIMIT_NICE and RLIMIT_RTPRIO, which Python does not name everywhere


def lay_down() -> None:
    """Where the kernel does not let this user (a nice value cannot be taken back), it stays as it is."""
    os.chdir("/")
    os.umask(0o022)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    for internal in _C_LIBRARY_SIGNALS:
        libc.syscall(SYS_RT_SIGACTION, internal, _IGNORE, None, 8)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    libc.syscall(SYS_IOPRIO_SET, 1, 0, 0)
    libc.prctl(PR_SET_TIMERSLACK, 0, 0, 0, 0)
    libc.personality(0)
    libc.syscall(SYS_KEYCTL, JOIN_SESSION_KEYRING, None)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj") as file:
        if int(file.read()) < 0:
            put("/proc/self/oom_score_adj", b"0")
    _limits()
    _descriptors()


def _descriptors() -> None:
    """More for this program and its helpers than any sandbox can have, and so more than one can keep under way."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    config.descriptors = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    with contextlib.suppress(OSError, ValueError):  # only root may have more than it was given
        with open("/proc/sys/fs/nr_open") as file:
            most = int(file.read())
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < 2 * DESCRIPTORS:
        config.descriptors = min(config.descriptors, hard * 3 // 4)


def _limits() -> None:
    for name in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA, resource.RLIMIT_AS):
        hard = resource.getrlimit(name)[1]
        resource.setrlimit(name, (hard, hard))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    for name, most in ((_NICE, 0), (_REALTIME_PRIORITY, 0), (resource.RLIMIT_CORE, 1)):
        with contextlib.suppress(
            OSError, ValueError
        ):  # with a hard limit of 0, only root may have cores of 1
            resource.setrlimit(name, (most, most))
