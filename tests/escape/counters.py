"""Attempts to use up what the kernel counts for a user or for the machine, while somebody outside needs it too."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator

from lowtide.errors import LowtideError
from tests.escape.attempt import PREAMBLE, Target, attempt

HOLD_SECONDS = 60.0
_libc = ctypes.CDLL(None, use_errno=True)
_IPC_PRIVATE, _IPC_RMID = 0, 0


@contextlib.contextmanager
def holding(target: Target, code: str) -> Iterator[None]:
    """While hostile code holds on to what it got; it must come to an end of its own."""
    with target.make() as box:
        raised = """
import fcntl, resource, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
"""
        done = "\nopen('/root/held', 'w').close()\ntime.sleep(600)\n"
        process = box.exec(["python3", "-c", PREAMBLE + raised + code + done])
        deadline = time.monotonic() + HOLD_SECONDS
        with contextlib.suppress(LowtideError):
            while not box.exists("/root/held").result() and not process.done():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        yield


def _refused(what: str, result: int) -> str | None:
    return None if result >= 0 else f"{what}: {os.strerror(ctypes.get_errno())}"


@attempt("use up the message queues")
def message_queues(target: Target) -> str | None:
    with holding(
        target,
        """
made = 0
while made < 5000 and libc.mq_open(b"/q%d" % made, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0:
    made += 1
""",
    ):
        name = b"/lowtide-escape-%d" % os.getpid()
        queue = _libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None)
        said = _refused("no message queue can be made outside", queue)
        if queue >= 0:
            os.close(queue)
            _libc.mq_unlink(name)
    return said


@attempt("use up the shared memory segments")
def shared_memory(target: Target) -> str | None:
    with holding(
        target,
        """
made = 0
while made < 50000 and libc.shmget(0, 4096, 0o1600) >= 0:
    made += 1
""",
    ):
        segment = _libc.shmget(_IPC_PRIVATE, 4096, 0o1600)
        said = _refused("no segment can be made outside", segment)
        if segment >= 0:
            _libc.shmctl(segment, _IPC_RMID, None)
    return said


@attempt("use up the semaphores")
def semaphores(target: Target) -> str | None:
    with holding(
        target,
        """
made = 0
while made < 50000 and libc.semget(0, 250, 0o1600) >= 0:
    made += 1
""",
    ):
        found = _libc.semget(_IPC_PRIVATE, 1, 0o1600)
        said = _refused("no semaphore can be made outside", found)
        if found >= 0:
            _libc.semctl(found, 0, _IPC_RMID)
    return said


@attempt("use up the file locks")
def file_locks(target: Target) -> str | None:
    with (
        holding(
            target,
            """
file = open("/root/locked", "w+b")
for number in range(100000):
    tried(fcntl.lockf, file, fcntl.LOCK_EX, 1, number * 2)
""",
        ),
        tempfile.TemporaryFile() as file,
    ):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as error:
            return f"no file can be locked outside: {error}"
    return None


@attempt("use up the open files")
def open_files(target: Target) -> str | None:
    with holding(
        target,
        """
for child in range(8):
    if os.fork() == 0:
        held = []
        while (fd := tried(os.open, "/dev/null", os.O_RDONLY)) is not None:
            held.append(fd)
        time.sleep(600)
time.sleep(3)
""",
    ):
        try:
            for fd in [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]:
                os.close(fd)
        except OSError as error:
            return f"no file can be opened outside: {error}"
    return None


@attempt("use up the pages of pipes")
def pipe_pages(target: Target) -> str | None:
    """An ordinary user's new pipes get smaller (docs/security.md); they must still be made, and work."""
    with holding(
        target,
        """
held = []
while len(held) < 20000 and (pipe := tried(os.pipe)) is not None:
    held.append(pipe)
    tried(fcntl.fcntl, pipe[1], 1031, 1 << 20)
""",
    ):
        try:
            read, write = os.pipe()
            os.write(write, bytes(4096))
            whole = len(os.read(read, 4096)) == 4096
            os.close(read)
            os.close(write)
        except OSError as error:
            return f"no pipe can be made outside: {error}"
    return None if whole else "a pipe does not hold a page"


@attempt("use up the keys", providers=("local",))
def keys(target: Target) -> str | None:
    made = target.python("""
made = 0
for number in range(300):
    made += call(248, 217, b"user", b"k%d" % number, b"x", 1, -3)[0] >= 0
    made += call(250, 219, 1, b"r%d" % number, 0, 0, 0)[0] >= 0
print(made)
""")
    return None if made == "0" else f"made {made} keys and keyrings"


@attempt("use up the pending signals and timers")
def pending_signals(target: Target) -> str | None:
    with holding(
        target,
        """
timer = ctypes.c_void_p()
made = 0
while made < 500000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    made += 1
""",
    ):
        timer = ctypes.c_void_p()
        result = _libc.timer_create(1, None, ctypes.byref(timer))
        if result == 0:
            _libc.timer_delete(timer)
    return _refused("no timer can be made outside", result)


@attempt("use up the descriptors that are on their way between processes")
def descriptors_in_flight(target: Target) -> str | None:
    with (
        holding(
            target,
            """
import array, socket
pairs, held = [], 0
while held < 200000 and (pair := tried(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)) is not None:
    pairs.append(pair)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))]
    sent = [tried(pair[0].sendmsg, [b"x"], rights) for _ in range(5)]
    if None in sent:
        break
    held += 1000
""",
        ),
        target.make() as box,
    ):
        try:
            box.write_file("/tmp/it", b"here").result(HOLD_SECONDS)
            read = box.read_file("/tmp/it").result(HOLD_SECONDS)
            said = box.exec(["echo", "on"]).result(HOLD_SECONDS).stdout
        except (LowtideError, OSError) as error:
            return f"another sandbox is not served: {error}"
    return None if (read, said) == (b"here", "on\n") else f"another sandbox answers {read!r} and {said!r}"
