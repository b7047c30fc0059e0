"""Ending a command's whole process tree, from outside the sandbox.

Nothing in there can see, stop or kill whoever does this. It looks through the sandbox's own /proc, whose
directories are also what signals are sent to: a number that is used again is never the wrong process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time

from .wire import Fds, Message, failure, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER = "LOWTIDE_PROCESS"
LARGEST = 1 << 21  # of an environment that is looked through
THREADS = 17  # of the fields of a stat file after the name: how many threads there are
LOOKS = 50  # in a row that find nothing, while other processes come and go
LOCKS = 10  # RLIMIT_LOCKS: nothing has looked at it for twenty years, and every descendant inherits it


def tag(mark: str) -> int:
    """The same mark as a number for the unused limit, which an emptied environment does not lose."""
    return int(mark, 16) >> 2


def wear(mark: str) -> None:
    """Put the mark on this process, for what it starts or becomes next."""
    with contextlib.suppress(OSError, ValueError):  # its hard limit is lower: then the environment has to do
        resource.setrlimit(LOCKS, (tag(mark), resource.getrlimit(LOCKS)[1]))


def terminate_tree(message: Message, fds: Fds) -> int:
    """Fork one that ends what carries the mark, and its children. It runs nothing of the sandbox."""
    pid = os.fork()
    if pid:
        return pid
    try:
        processes = open_processes(fds[1])
        end_tree(processes, message["mark"], message["grace"])
        send(fds[0], {"ok": True})
    except BaseException as error:
        failure(fds[0], error)
    finally:
        os._exit(0)


def open_processes(pidfd: int) -> int:
    """The /proc of the sandbox whose process 1 this is."""
    with open(f"/proc/self/fdinfo/{pidfd}", "rb", buffering=0) as file:
        number = next(int(line[4:]) for line in file.read(4096).splitlines() if line.startswith(b"Pid:"))
    if number <= 0:
        raise ProcessLookupError(errno.ESRCH, "the sandbox is gone")
    processes = os.open(f"/proc/{number}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    signal.pidfd_send_signal(pidfd, 0)  # it was this one that was opened, and no later one of its number
    return processes


def end_tree(processes: int, mark: str, grace: float) -> None:
    deadline = time.monotonic() + grace
    known: set[tuple[int, bytes]] = set()
    told: set[tuple[int, bytes]] = set()
    last = time.monotonic() + grace + 30
    ended: set[int] = set()
    looks = 0
    while time.monotonic() < last:
        before = ended
        known, ended = marked(processes, mark, known)
        if not known:
            # One that ended just now may be of a chain, in which each process forks the next one and ends.
            looks += 1
            if ended <= before or looks >= LOOKS:
                return
            time.sleep(0.002)
            continue
        looks = 0
        late = time.monotonic() >= deadline
        for process in known:
            if late or process not in told:
                told.add(process)
                tell(processes, process, (signal.SIGKILL,) if late else (signal.SIGTERM, signal.SIGCONT))
        time.sleep(0.005 if late else 0.01)
    raise TimeoutError(errno.ETIMEDOUT, "its processes do not end although they were killed")


def tell(processes: int, process: tuple[int, bytes], signals: tuple[signal.Signals, ...]) -> None:
    """Its directory is one process for ever, whoever gets the number."""
    with contextlib.suppress(OSError), opened(processes, process[0]) as folder:
        fields = stat_fields(folder)
        if fields and fields[19] == process[1]:
            for number in signals:
                signal.pidfd_send_signal(folder, number)


def marked(
    processes: int, mark: str, known: set[tuple[int, bytes]]
) -> tuple[set[tuple[int, bytes]], set[int]]:
    """Live processes that carry the mark or descend from one that does or did: number and start.

    And the numbers of those that had ended when they were looked at.
    """
    living: dict[int, tuple[int, bytes]] = {}
    found: set[int] = set()
    ended: set[int] = set()
    for name in os.listdir(processes):
        if not name.isdigit() or name == "1":
            continue
        pid = int(name)
        ended.add(pid)
        with contextlib.suppress(OSError), opened(processes, pid) as folder:
            fields = stat_fields(folder)
            if fields and lives(fields):
                living[pid] = (int(fields[1]), fields[19])
                if (pid, fields[19]) in known or wears(folder, mark):
                    found.add(pid)
                fields = stat_fields(folder)
                if fields and lives(fields):
                    ended.discard(pid)
    grown = True
    while grown:
        grown = False
        for pid, (parent, _) in living.items():
            if pid not in found and parent in found:
                found.add(pid)
                grown = True
    return {(pid, living[pid][1]) for pid in found}, ended


@contextlib.contextmanager
def opened(processes: int, pid: int) -> Iterator[int]:
    folder = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=processes)
    try:
        yield folder
    finally:
        os.close(folder)


def stat_fields(folder: int) -> list[bytes]:
    return small(folder, "stat", 4096).rpartition(b")")[2].split()


def lives(fields: list[bytes]) -> bool:
    """A process whose first thread has left is shown as a zombie while its other threads run on."""
    return fields[0] not in (b"Z", b"X") or int(fields[THREADS]) > 1


def wears(folder: int, mark: str) -> bool:
    for line in small(folder, "limits", 8192).splitlines():
        if line.startswith(b"Max file locks") and line.split()[3] == b"%d" % tag(mark):
            return True
    return f"{MARKER}={mark}".encode() in small(folder, "environ", LARGEST).split(b"\0")


def small(folder: int, name: str, size: int) -> bytes:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return b""
    try:
        return os.read(fd, size)
    except OSError:
        return b""
    finally:
        os.close(fd)
