"""A program of its own: send SIGSTOP to every process in a sandbox at once, from inside its process namespace.

The kernel sends a signal to all processes of a namespace in one instant, and a fork that is under way begins anew after
it. Signals sent to one process after the other never catch up with a chain in which each process forks the next and exits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_NEWUSER, _NEWPID = 0x10000000, 0x20000000
_SET_DUMPABLE = 4


def main(pid: int, start_time: int) -> None:
    """In the sandbox whose process 1 has this number and start."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    pidfd = os.pidfd_open(pid)
    with open(f"/proc/{pid}/stat", "rb") as file:
        if int(file.read().rpartition(b")")[2].split()[19]) != start_time:
            return  # the number is another process's by now
    own = os.stat("/proc/self/ns/pid").st_ino
    if libc.setns(pidfd, _NEWPID if os.geteuid() == 0 else _NEWUSER | _NEWPID) < 0:
        raise OSError(ctypes.get_errno(), "the sandbox cannot be entered")
    child = os.fork()
    if child == 0:
        # Nothing of this machine, whatever happened before: the signal goes to everybody in this namespace.
        try:
            if os.stat("/proc/self/ns/pid").st_ino != own and os.getppid() == 0:
                os.kill(-1, signal.SIGSTOP)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
