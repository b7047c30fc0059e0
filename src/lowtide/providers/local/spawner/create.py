"""Starting a sandbox: the process that becomes bwrap, and the ids its first process gets."""

from __future__ import annotations

import array
import binascii
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct

from . import ids
from .config import config
from .inheritance import JOIN_SESSION_KEYRING
from .kernel import NEWNS, NEWUSER, SYS_CLOSE_RANGE, SYS_KEYCTL, check, libc, put
from .restrictions import default_signals, first_limits
from .set_up import DISK, attach, clone, see_as, stage_as_user, write_maps
from .wire import Fds, Message, complain, receive

# The descriptors bwrap and the sandbox's first process find open. The first process knows READY, SELF and PLACE.
# It keeps IDS open, the lock on its range of ids, without ever using it.
INFO, NAMESPACE, SECCOMP, READY, SELF, STATUS, ARGS, PLACE, IDS = 3, 4, 5, 6, 7, 8, 9, 10, 11
KEPT = b"+"  # before the names of the sandbox's environment, as the outer bwrap holds it

# Of 128 instances and some 10,000 watches or marks that a user has on the whole machine.
COUNTERS = (
    ("max_inotify_instances", b"32"),
    ("max_inotify_watches", b"8192"),
    ("max_fanotify_groups", b"8"),
    ("max_fanotify_marks", b"1024"),
)

# What bwrap looks for in /dev: the memory devices and the controlling terminal.
DEVICES = (
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
)

RLIMIT_SIGPENDING, RLIMIT_MSGQUEUE = 11, 12  # which Python does not name everywhere


class Spare:
    """A process that waits to become the next sandbox's bwrap: forked, a child of init, with a user namespace.

    Forking twice and mapping ids is a good part of a create; this way it is done beforehand, in a quiet moment.
    """

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                if config.base is None and config.point:
                    stage_as_user()
                between = os.getpid()
                base, held = ids.take(config.count) if config.own_ranges else (config.base, -1)
                holds_r, holds_w = os.pipe()
                if os.fork() == 0:
                    os.close(holds_w)
                    its = Ids(base=base, held=held)
                    its.take_namespace(between, holds_r)
                    wait_for_work(theirs, its)
                else:
                    hold_namespace(holds_w, base)
            finally:
                os._exit(1)
        theirs.close()

    def take(self, message: Message, fds: Fds) -> None:
        """Send the spare what to become. It reports failures where bwrap would."""
        data, held = json.dumps(message).encode(), list(fds)
        if len(data) > 60_000:
            held.append(os.memfd_create("request", os.MFD_CLOEXEC))
            for at in range(0, len(data), 1 << 20):
                os.write(held[-1], data[at : at + (1 << 20)])
            data = b"M"
        try:
            self.ours.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", held))])
        except OSError as error:
            complain(fds[0], error)
        finally:
            self.ours.close()
            for fd in held[len(fds) :]:
                os.close(fd)


class Ids:
    """Which ids one sandbox has: the first one, what holds the range, and its user namespace."""

    def __init__(self, *, base: int | None, held: int = -1) -> None:
        self.base, self.held = base, held
        self.namespace = -1
        self.disk = -1  # the user namespace that maps what is on the disk to a range of its own
        self.trouble: OSError | None = None

    def become(self) -> None:
        if self.base is not None:
            os.setgroups([])
            os.setresgid(self.base, self.base, self.base)
            os.setresuid(self.base, self.base, self.base)

    def take_namespace(self, between: int, holds: int) -> None:
        """In the spare: map the namespace's ids, open it, and become a child of init.

        A failure is kept, and reported when a sandbox is requested.
        """
        pidfd = os.pidfd_open(between)
        try:
            if os.read(holds, 1) != b"1":
                raise OSError(errno.EPERM, "No permissions to create a new user namespace")
            if self.base is None:
                write_maps(between, b"0 %d 1" % os.geteuid(), b"0 %d 1" % os.getegid())
            else:
                everything = b"0 %d %d" % (self.base, config.count)
                write_maps(between, everything, everything)
            self.namespace = os.open(f"/proc/{between}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            if config.own_ranges and self.base is not None:
                self.disk = see_as(self.base, self.namespace)
        except OSError as error:
            self.trouble = error
        finally:
            # bwrap dies with its parent, and that must be init and not the one between. The kernel
            # reports a process as ended only after its children have their new parent.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()


def hold_namespace(holds: int, base: int | None) -> None:
    """In the one between: make the user namespace as the user that bwrap will be, for only its maker may join it."""
    Ids(base=base).become()
    leave_half()
    if libc.unshare(NEWUSER) == 0:
        bound_counters()
        os.write(holds, b"1")
        while True:
            signal.pause()


def leave_half() -> None:
    """What is held now bounds what all of the new user namespace adds to its user's count: the user keeps the rest."""
    for name in (RLIMIT_SIGPENDING, RLIMIT_MSGQUEUE):
        soft, hard = resource.getrlimit(name)
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(name, (soft // 2, hard))


def bound_counters() -> None:
    """In the new user namespace: what the kernel counts for a user, whom all sandboxes and their owner share."""
    for name, most in COUNTERS:
        try:
            put(f"/proc/sys/user/{name}", most)
        except OSError:
            continue  # a kernel without it


def wait_for_work(own: socket.socket, its: Ids) -> None:
    """In the spare: hold nothing of anybody's while waiting, leave when whoever may use it does."""
    held = [fd for fd in (its.held, its.namespace, its.disk) if fd >= 0]
    keep = sorted({0, 1, 2, own.fileno(), config.elf_fd, config.seccomp_fd, *held})
    for low, high in zip(keep, [*keep[1:], 0x80000000], strict=True):
        if low + 1 <= high - 1:
            libc.syscall(SYS_CLOSE_RANGE, low + 1, high - 1, 0)
    work = receive(own)
    if work is None:
        return
    message, (stderr, info, ready) = work
    os.dup2(stderr, 2)  # as bwrap has it: what fails after the descriptors have moved is said there, too
    try:
        if its.trouble is not None:
            raise its.trouble
        become_bwrap(message, stderr, info, its, ready)
    except BaseException as error:
        complain(2, error)


def become_bwrap(message: Message, stderr: int, info: int, its: Ids, ready: int) -> None:
    place = message["dir"]
    argv = encoded(["bwrap", "--args", str(ARGS), "--", f"/proc/self/fd/{SELF}", *message["command"]])
    put(f"{place}/pid", identity(os.getpid()) + b"\n", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for procs in message["cgroups"]:
        put(procs, b"0")
    if not config.own_ranges and (message["disk"] or config.base is not None):
        check(libc.unshare(NEWNS), "unshare")
        check(libc.mount(None, b"/", None, 0x4000 | 0x80000, None), "make / a slave")
    if message["disk"]:
        mount_disk(message["disk"], its)
    if config.own_ranges:
        for tree, target in message["foreign"]:
            attach(clone(tree, its.namespace), target)
    if config.base is not None:
        own_devices()
    os.setsid()
    libc.syscall(SYS_KEYCTL, JOIN_SESSION_KEYRING, None)  # of its own: none of another sandbox's keys
    first_limits()
    args = os.memfd_create("args", 0)
    os.write(args, joined(message["args"]))
    os.lseek(args, 0, 0)
    status = os.open(f"{place}/status", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    own = os.open(
        f"{place}/status", os.O_PATH | os.O_CLOEXEC
    )  # without a link when the directory was removed
    if os.fstat(own).st_nlink == 0:  # a file system that counts none: nothing is said by that
        own = os.open("/dev/null", os.O_PATH | os.O_CLOEXEC)
    seccomp = os.open(f"/proc/self/fd/{config.seccomp_fd}", os.O_RDONLY)  # its own offset
    null = os.open("/dev/null", os.O_RDWR)
    printed = null
    if message["command"][0] == "run":
        # Written by the first process only, which nobody can look into; the command has a pipe to it.
        printed = os.open(f"{place}/log", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    wanted = (
        null,
        printed,
        stderr,
        info,
        its.namespace,
        seccomp,
        ready,
        config.elf_fd,
        status,
        args,
        own,
        its.held if its.held >= 0 else null,
        *map(memory, message.get("files", ())),
    )
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(wanted)) for fd in wanted]
    for target, fd in enumerate(copies):
        os.dup2(fd, target, inheritable=True)
    libc.syscall(SYS_CLOSE_RANGE, len(wanted), 0x7FFFFFFF, 4)  # mark close-on-exec
    default_signals()
    if message["lifetime"]:
        # An alarm survives exec. It ends the outer bwrap, and with it everything inside.
        signal.setitimer(signal.ITIMER_REAL, message["lifetime"])
    its.become()
    os.chdir("/")
    # For whoever attaches later: bwrap clears these and sets the real ones. The names are others, so that none of
    # them means something to bwrap's own loader.
    kept = {KEPT + os.fsencode(name): os.fsencode(value) for name, value in message["environment"].items()}
    os.execve(message["bwrap"], argv, kept)  # noqa: S606


def memory(data: str) -> int:
    """What bwrap copies into a file of the new namespaces, so that it is on no disk."""
    fd = os.memfd_create("file", os.MFD_CLOEXEC)
    view = memoryview(binascii.a2b_base64(data))
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, 0)
    return fd


def joined(arguments: list[str]) -> bytes:
    """For bwrap, which takes them apart at each NUL: one inside a word would make two arguments of it."""
    return b"".join(word + b"\0" for word in encoded(arguments))


def encoded(arguments: list[str]) -> list[bytes]:
    words = [os.fsencode(argument) for argument in arguments]
    if any(b"\0" in word for word in words):
        raise ValueError("an argument for bwrap contains a NUL byte")
    return words


def identity(pid: int) -> bytes:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return b"%d %s" % (pid, file.read(4096).rpartition(b")")[2].split()[19])


def own_devices() -> None:
    """Device nodes that no other sandbox has: bwrap takes those of the /dev that it finds.

    A lock or a watch on a node is seen by everybody who has the same one. Where root may make no nodes (a container
    without CAP_MKNOD), the sandbox has this machine's.
    """
    if libc.mount(b"lowtide", b"/dev", b"tmpfs", 0x2 | 0x8, b"mode=0755,size=64k,nr_inodes=16") < 0:
        return
    try:
        for name, major, minor in DEVICES:
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
            os.chmod(f"/dev/{name}", 0o666)  # noqa: S103 - as on every machine
        os.close(
            os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        )  # made, but not to be opened: so in a user namespace
    except OSError:
        check(libc.umount2(b"/dev", 2), "unmount /dev")  # MNT_DETACH


def mount_disk(disk: Message, its: Ids) -> None:
    """A filesystem of a fixed size, in a mount namespace that goes away with the sandbox."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    image = os.open(disk["image"], os.O_RDWR | os.O_CLOEXEC)
    for _ in range(64):
        number = fcntl.ioctl(control, 0x4C82)  # LOOP_CTL_GET_FREE
        loop = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # struct loop_config: fd, block size, loop_info64 with lo_flags = AUTOCLEAR at offset 52
            info = bytearray(232)
            struct.pack_into("I", info, 52, 4)
            fcntl.ioctl(loop, 0x4C0A, struct.pack("II", image, 0) + bytes(info) + bytes(64))
        except OSError as error:
            os.close(loop)
            if error.errno != errno.EBUSY:
                raise
            continue
        options = 0x2 | 0x4 | 0x400  # nosuid, nodev, noatime
        check(
            libc.mount(f"/dev/loop{number}".encode(), disk["at"].encode(), b"ext4", options, b""),
            "mount the disk",
        )
        os.close(loop)
        break
    else:
        raise OSError(errno.EBUSY, "no free loop device")
    for name, mode in disk["make"].items():
        path = f"{disk['at']}/{name}"
        if not os.path.isdir(path):
            os.mkdir(path, mode)
            os.chmod(path, mode)
            if config.base is not None:
                os.chown(path, config.base, config.base)
    if config.own_ranges:
        attach(clone(disk["at"], its.disk, writable=True), f"{config.point}/{DISK}")
