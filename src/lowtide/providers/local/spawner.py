"""The spawner: one small single-threaded process that starts sandboxes and enters running ones.

It is run as ``python -I -S spawner.py FD`` with an empty environment and imports nothing of lowtide,
because it forks for every call and a small process forks fast, and because forking a program with
threads is not safe. It takes requests on a SOCK_SEQPACKET socket; every request brings its own reply
socket, so that nothing waits in line. It ends when its control socket closes; the sandboxes go on.

What enters a sandbox imports, looks up and loads nothing from then on: files in there are hostile.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
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
import sys
import termios
import time
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET, CLONE_PARENT = 0x10000000, 0x20000000, 0x40000000, 0x8000
ALL_BUT_NET = NEWUSER | NEWPID | NEWNS | NEWIPC | NEWUTS | NEWCGROUP
MACHINE = os.uname().machine
SYS_CLONE = 56 if MACHINE == "x86_64" else 220
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
SYS_KEYCTL = 250 if MACHINE == "x86_64" else 219
SYS_CAPSET = 126 if MACHINE == "x86_64" else 91
SYS_CLOSE_RANGE = 436
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAP_AMBIENT = 4, 24, 38, 22, 47
AT_EMPTY_PATH = 0x1000
TIOCGPTPEER, TIOCSPTLCK = 0x5441, 0x40045431

# The descriptors bwrap and the sandbox's first process find open. The first process knows READY and SELF.
INFO, BLOCK, SECCOMP, READY, SELF, STATUS, ARGS = 3, 4, 5, 6, 7, 8, 9

MARKER = "LOWTIDE_PROCESS"
_QUIET_SECONDS = 0.004  # without a request: then there is time to prepare the next sandbox
Fds = list[int]
Message = dict[str, Any]


class Config:
    """What does not change while this spawner lives. Comes with the first message."""

    base: int | None = None  # first id of the range the sandboxes run as; None: this user
    count: int = 65536
    own_pid_namespace: int = -1
    point: str = ""  # where trees are staged
    seccomp: bytes = b""
    elf_fd: int = -1
    seccomp_fd: int = -1
    program: ctypes.Array[ctypes.c_char] | None = None


config = Config()


def check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


# ---------------------------------------------------------------- set-up


def configure(message: Message, fds: Fds) -> Message:
    config.base, config.count = message["base"], message["count"]
    config.seccomp = bytes.fromhex(message["seccomp"])
    config.elf_fd = sealed("lowtide", bytes.fromhex(message["elf"]))
    config.seccomp_fd = sealed("seccomp", config.seccomp)
    buffer = ctypes.create_string_buffer(config.seccomp, len(config.seccomp))
    config.program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(config.seccomp) // 8, ctypes.addressof(buffer)), 16
    )
    config.program.keep = buffer  # type: ignore[attr-defined]
    if config.base is None:
        return {"staged": {}, "idmapped": False}
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # and so its children, until they have executed
    config.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    return stage(message["home"], message["trees"], message["points"])


def sealed(name: str, data: bytes) -> int:
    """A memory file nobody can change any more, whoever gets hold of it."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | 0x10)  # MFD_EXEC
    except OSError:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, 1033, 0xF)  # F_ADD_SEALS: seal, shrink, grow, write
    return fd


def stage(home: str, trees: list[str], points: list[str]) -> Message:
    """As root: a private place where the sandboxes' range of ids sees the host's trees as its own.

    The trees are cloned and id-mapped, so that their owner is the sandbox's root and can be copied
    up; `home` is cloned as it is, because the range cannot walk through a closed home directory.
    """
    check(libc.unshare(NEWNS), "unshare")
    check(libc.mount(None, b"/", None, 0x4000 | 0x80000, None), "make / a slave")  # MS_REC | MS_SLAVE
    point = next((p for p in points if os.path.isdir(p) and not os.path.islink(p)), None)
    if point is None:
        raise OSError(errno.ENOENT, f"none of {', '.join(points)} exists to stage on")
    check(libc.mount(b"lowtide", point.encode(), b"tmpfs", 0x2 | 0x4, b"mode=0755,size=1m"), "mount tmpfs")
    config.point = point
    staged = {home: graft(home, f"{point}/home", None, writable=True)}
    idmapped = True
    pid, namespace = user_namespace()
    try:
        for number, tree in enumerate(trees):
            target = f"{point}/{number}"
            try:
                staged[tree] = graft(tree, target, namespace)
            except OSError:
                idmapped = False  # old kernel, or a filesystem that cannot: seen with foreign owners then
                staged[tree] = graft(tree, target, None)
    finally:
        os.close(namespace)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"staged": staged, "idmapped": idmapped}


def stage_more(tree: str) -> Message:
    """One more tree, asked for later: a root filesystem somebody named."""
    target = f"{config.point}/{len(os.listdir(config.point))}"
    pid, namespace = user_namespace()
    try:
        return {"staged": graft(tree, target, namespace)}
    finally:
        os.close(namespace)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def graft(source: str, target: str, namespace: int | None, *, writable: bool = False) -> str:
    os.mkdir(target, 0o755)
    # OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC
    fd = check(libc.syscall(SYS_OPEN_TREE, -100, source.encode(), 1 | os.O_CLOEXEC), f"clone {source}")
    try:
        # nosuid | nodev; the host's trees read-only, and id-mapped where a namespace is given. An id-mapped
        # tree belongs to the sandbox's root: writable, it would be a way out through /proc/1/exe.
        flags = 2 | 4 | (0 if writable else 1) | (0x100000 if namespace is not None else 0)
        attributes = struct.pack("QQQQ", flags, 0, 0, namespace or 0)
        result = libc.syscall(SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attributes, ctypes.c_size_t(32))
        if result < 0:
            os.rmdir(target)
            check(result, f"idmap {source}")
        check(libc.syscall(SYS_MOVE_MOUNT, fd, b"", -100, target.encode(), 4), f"mount {target}")
    finally:
        os.close(fd)
    return target


def user_namespace() -> tuple[int, int]:
    """A process that only holds a user namespace with the sandboxes' map, and a descriptor of it."""
    done_r, done_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        ok = libc.unshare(NEWUSER) == 0
        os.write(done_w, b"1" if ok else b"0")
        while True:
            signal.pause()
    ok = os.read(done_r, 1) == b"1"
    os.close(done_r)
    os.close(done_w)
    try:
        if not ok:
            raise OSError(errno.EPERM, "user namespaces are not allowed")
        write_maps(pid)
        return pid, os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def write_maps(pid: int) -> None:
    if config.base is None:
        put(f"/proc/{pid}/setgroups", b"deny")
        put(f"/proc/{pid}/uid_map", b"0 %d 1" % os.geteuid())
        put(f"/proc/{pid}/gid_map", b"0 %d 1" % os.getegid())
    else:
        put(f"/proc/{pid}/uid_map", b"0 %d %d" % (config.base, config.count))
        put(f"/proc/{pid}/gid_map", b"0 %d %d" % (config.base, config.count))


def put(path: str, data: bytes, flags: int = os.O_WRONLY) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- create


class Creation:
    """One sandbox on its way: from the request until its first process may run."""

    def __init__(self, message: Message, fds: Fds, spare: Spare | None) -> None:
        self.message = message
        self.reply, self.stderr, self.ready = fds
        self.info_r, self.info_w = os.pipe()
        self.block_r, self.block_w = os.pipe()
        given = [self.stderr, self.info_w, self.block_r, self.ready]
        if not (spare is not None and spare.take(message, given)):
            Spare().take(message, given)
        for fd in given:
            os.close(fd)

    def advance(self) -> None:
        """bwrap said who the first process in the namespaces is: give it its ids and let it go on."""
        try:
            said = b""
            while not said.rstrip().endswith(b"}"):  # bwrap writes it in pieces, and dies of a closed pipe
                piece = os.read(self.info_r, 65536)
                if not piece:
                    break
                said += piece
            inner = json.loads(said)["child-pid"] if said else 0
            if not inner:
                return send(self.reply, {"error": "bwrap"})
            write_maps(inner)
            put(f"{self.message['dir']}/pid", b"\n" + identity(inner), os.O_WRONLY | os.O_APPEND)
            os.write(self.block_w, b"1")
            send(self.reply, {"inner": inner})
        except (OSError, ValueError) as error:
            send(self.reply, {"error": "maps", "why": str(error)})
        finally:
            for fd in (self.info_r, self.block_w, self.reply):
                os.close(fd)


class Spare:
    """A process that waits to become the next sandbox's bwrap, already forked and already a child of init.

    Forking twice is a good part of a create; this way it is done beforehand, in a quiet moment.
    """

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                between = os.getpid()
                if os.fork() == 0:
                    # bwrap dies with its parent, and that must be init and not the one between. (An end of
                    # file on a pipe would be too early: descriptors are closed before children are told.)
                    while os.getppid() == between:
                        os.sched_yield()
                    wait_for_work(theirs)
            finally:
                os._exit(1)
        theirs.close()

    def take(self, message: Message, fds: Fds) -> bool:
        data, held = json.dumps(message).encode(), list(fds)
        if len(data) > 60_000:
            held.append(os.memfd_create("request", os.MFD_CLOEXEC))
            for at in range(0, len(data), 1 << 20):
                os.write(held[-1], data[at : at + (1 << 20)])
            data = b"M"
        try:
            self.ours.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", held))])
            return True
        except OSError:
            return False  # it is gone: somebody killed it
        finally:
            self.ours.close()
            for fd in held[len(fds) :]:
                os.close(fd)


def wait_for_work(own: socket.socket) -> None:
    """In the spare: hold nothing of anybody's while waiting, leave when the spawner does."""
    keep = sorted((0, 1, 2, own.fileno(), config.elf_fd, config.seccomp_fd))
    for low, high in zip(keep, [*keep[1:], 0x80000000], strict=True):
        if low + 1 <= high - 1:
            libc.syscall(SYS_CLOSE_RANGE, low + 1, high - 1, 0)
    work = receive(own)
    if work is None:
        return
    message, (stderr, info, block, ready) = work
    try:
        become_bwrap(message, stderr, info, block, ready)
    except BaseException as error:
        complain(stderr, error)


def become_bwrap(message: Message, stderr: int, info: int, block: int, ready: int) -> None:
    place = message["dir"]
    put(f"{place}/pid", identity(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for procs in message["cgroups"]:
        put(procs, b"0")
    if message["disk"]:
        mount_disk(message["disk"])
    os.setsid()
    libc.syscall(SYS_KEYCTL, 1, None)  # a session keyring of its own: none of the caller's keys
    first_limits()
    args = os.memfd_create("args", 0)
    os.write(args, b"\0".join(os.fsencode(a) for a in message["args"]) + b"\0")
    os.lseek(args, 0, 0)
    status = os.open(f"{place}/status", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    seccomp = os.open(f"/proc/self/fd/{config.seccomp_fd}", os.O_RDONLY)  # its own offset
    null = os.open("/dev/null", os.O_RDWR)
    wanted = (
        null,
        null,
        stderr,
        info,
        block,
        seccomp,
        ready,
        config.elf_fd,
        status,
        args,
    )
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in wanted]
    for target, fd in enumerate(copies):
        os.dup2(fd, target, inheritable=True)
    libc.syscall(SYS_CLOSE_RANGE, len(wanted), 0x7FFFFFFF, 4)  # mark close-on-exec
    default_signals()
    if message["lifetime"]:
        # An alarm survives exec. It ends the outer bwrap, and with it everything inside.
        signal.setitimer(signal.ITIMER_REAL, message["lifetime"])
    if config.base is not None:
        os.setgroups([])
        os.setresgid(config.base, config.base, config.base)
        os.setresuid(config.base, config.base, config.base)
    os.chdir("/")
    argv = ["bwrap", "--args", str(ARGS), "--", f"/proc/self/fd/{SELF}", *message["command"]]
    os.execve(message["bwrap"], [os.fsencode(a) for a in argv], {})  # noqa: S606


def identity(pid: int) -> bytes:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return b"%d %s" % (pid, file.read(4096).rpartition(b")")[2].split()[19])


def first_limits() -> None:
    """What every process of a sandbox gets, the first one and those that enter later."""
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # 1: not even to a piped core handler of the host
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hard = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
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


def mount_disk(disk: Message) -> None:
    """A filesystem of a fixed size, in a mount namespace that goes away with the sandbox."""
    check(libc.unshare(NEWNS), "unshare")
    check(libc.mount(None, b"/", None, 0x4000 | 0x80000, None), "make / a slave")
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
    for name in disk["make"]:
        path = f"{disk['at']}/{name}"
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
            if config.base is not None:
                os.chown(path, config.base, config.base)


# ---------------------------------------------------------------- entering a sandbox


def enter(pidfd: int, cgroups: list[str], flags: int) -> None:
    sys.meta_path.clear()  # no module can be loaded any more: it would come from the sandbox
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for procs in cgroups:
        put(procs, b"0")
    if config.base is not None:
        os.setgroups([])
    check(libc.setns(pidfd, flags), "enter the sandbox")


def restrict(uid: int, gid: int, nproc: int, dumpable: bool = False) -> None:
    """Become what the sandbox's first process is: its ids, no capabilities, its limits, its filter."""
    first_limits()
    if nproc:
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


def start_process(message: Message, fds: Fds, births: int, key: int) -> int:
    """Fork one that joins the namespaces and makes there, as its own sibling, the one that executes."""
    first = os.fork()
    if first:
        return first
    try:
        enter(fds[1], message["cgroups"], message["flags"])
        born = libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if born == 0:
            run_command(message, fds)
        check(born, "clone")
        os.write(births, struct.pack("qq", key, born))
    except BaseException as error:
        failure(fds[0], error)
    os._exit(0)


def leave_process_namespace() -> None:
    """Whoever is forked next must not be born in there. There is no going on when this fails."""
    if libc.setns(config.own_pid_namespace, NEWPID) < 0:
        os._exit(1)


def start_process_as_root(message: Message, fds: Fds) -> int:
    """The same with one fork less: root may say beforehand in which process namespace its child is born."""
    check(libc.setns(fds[1], NEWPID), "enter the sandbox")
    try:
        pid = os.fork()
    except OSError:
        leave_process_namespace()
        raise ProcessLookupError(errno.ESRCH, "the sandbox is gone") from None
    if pid:
        leave_process_namespace()
        return pid
    try:
        enter(fds[1], message["cgroups"], message["flags"] & ~NEWPID)
        run_command(message, fds)
    except BaseException as error:
        failure(fds[0], error)
    os._exit(126)


def run_command(message: Message, fds: Fds) -> None:
    stdio = fds[2:]
    trouble = -1
    try:
        os.setsid()
        if message["tty"]:
            stdio = terminal(message["tty"], fds[0])
        for target, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in stdio]):
            os.dup2(fd, target, inheritable=True)
        trouble = 126
        environment = dict(message["env"])
        uid, gid = 0, 0
        if message["user"] is not None:
            uid, gid, home = look_up_user(message["user"])
            if home:
                environment["HOME"] = home
            environment["USER"] = environment["LOGNAME"] = message["user"]
            for fd in (0, 1, 2):  # so that /dev/stdout can be opened again
                with contextlib.suppress(OSError):
                    os.fchown(fd, uid, gid)
        environment.update(message["own_env"])
        restrict(uid, gid, message["nproc"])
        os.chdir(message["cwd"])
        default_signals()
        execute(message["argv"], {os.fsencode(k): os.fsencode(v) for k, v in environment.items()})
    except BaseException as error:
        if (
            isinstance(error, OSError)
            and error.errno in (errno.ENOENT, errno.ENOTDIR)
            and not error.filename2
        ):
            trouble = 127 if trouble != -1 else trouble
        if trouble == -1 or (isinstance(error, OSError) and error.errno == errno.EAGAIN):
            failure(fds[0], error)
            trouble = 126
        complain(2, error)
    os._exit(trouble)


def execute(argv: list[str], environment: dict[bytes, bytes]) -> None:
    arguments = [os.fsencode(a) for a in argv]
    name = arguments[0]
    if b"/" in name:
        candidates = [name]
    else:
        path = environment.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin")
        candidates = [(part or b".") + b"/" + name for part in path.split(b":")]
    refused: OSError | None = None
    for candidate in candidates:
        try:
            run_file(candidate, arguments, environment)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise  # the process limit, and no fault of the program
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = refused or error
    if refused is not None:
        raise OSError(refused.errno, os.strerror(refused.errno or 0), os.fsdecode(name), None, "found")
    raise FileNotFoundError(errno.ENOENT, "command not found", os.fsdecode(name))


def run_file(candidate: bytes, arguments: list[bytes], environment: dict[bytes, bytes]) -> None:
    if config.base is not None:
        os.execve(candidate, arguments, environment)  # noqa: S606
    # As an ordinary user this very interpreter may be a file the sandbox's user may write. A script that
    # names /proc/self/exe as its interpreter must find a sealed file there, and not this one.
    if not stat.S_ISREG(os.stat(candidate).st_mode):
        raise OSError(errno.EACCES, "not a regular file", os.fsdecode(candidate))
    if not os.access(candidate, os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(candidate))
    os.execve(config.elf_fd, [arguments[0], b"exec", candidate, *arguments], environment)  # noqa: S606


def terminal(size: list[int], reply: int) -> Fds:
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, TIOCSPTLCK, struct.pack("i", 0))
    slave = fcntl.ioctl(master, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY)  # no path in here is looked up
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    send(reply, {"tty": True}, [master])
    return [slave, slave, slave]


def look_up_user(name: str) -> tuple[int, int, str | None]:
    """By the sandbox's own /etc/passwd: name, uid, or uid:gid."""
    user, _, group = name.partition(":")
    for line in small_file("/etc/passwd").splitlines():
        fields = line.split(":")
        if (
            len(fields) >= 6
            and user in (fields[0], fields[2])
            and fields[2].isdigit()
            and fields[3].isdigit()
        ):
            return checked(int(fields[2])), checked(int(group if group.isdigit() else fields[3])), fields[5]
    if user.isdigit():
        return checked(int(user)), checked(int(group) if group.isdigit() else int(user)), None
    raise PermissionError(errno.EPERM, "no such user in the sandbox", name)


def checked(number: int) -> int:
    if number >= config.count or (config.base is None and number != 0):
        raise PermissionError(errno.EPERM, "an ordinary user's sandbox has only the user root", str(number))
    return number


def small_file(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return os.read(fd, 1 << 20).decode("utf-8", "replace")
    finally:
        os.close(fd)


# ---------------------------------------------------------------- calls answered from inside


def call_inside(message: Message, fds: Fds) -> int:
    """Fork one that enters and answers one file call with the sandbox's own rights.

    It stays out of the sandbox's process namespace: nothing in there sees it or can touch it.
    """
    work = CALLS[message["call"]]
    if message["call"] in ("read_tree", "write_tree"):
        load_tarfile()  # here and not inside, where it would come from the sandbox
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        enter(fds[1], message["cgroups"], message["flags"])
        restrict(0, 0, 0)
        work(message, fds)
    except OSError as error:
        send(fds[0], {"errno": error.errno or errno.EIO, "why": error.strerror or str(error)})
    except BaseException as error:
        send(fds[0], {"errno": errno.EIO, "why": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


SAFE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | SAFE)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "not a regular file", path)
    return fd


def call_read(message: Message, fds: Fds) -> None:
    # Asked first, because opening a device can already do something.
    mode = os.stat(message["path"]).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file")
    fd = open_regular(message["path"], os.O_RDONLY)
    send(fds[0], {"size": os.fstat(fd).st_size}, [fd])


def call_write(message: Message, fds: Fds) -> None:
    """Open a new file beside the target, hand it out, and put it in its place once the caller says so."""
    path = os.path.realpath(message["path"]) if os.path.islink(message["path"]) else message["path"]
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        there = None
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if there is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    mode = message["mode"]
    if mode is None:
        mode = stat.S_IMODE(there.st_mode) if there is not None else 0o644
    folder, name = os.path.split(path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    os.makedirs(folder or "/", 0o755, exist_ok=True)
    # Everything from here on happens in the directory that is open now, whatever its path becomes.
    place = os.open(folder or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f".lowtide-{os.getpid()}-{time.monotonic_ns()}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | SAFE, 0o600, dir_fd=place)
    done = False
    try:
        os.fchmod(fd, mode)
        send(fds[0], {"ok": True}, [fd])
        if os.read(fds[0], 1) == b"C":
            os.rename(temporary, name, src_dir_fd=place, dst_dir_fd=place)
            done = True
            send(fds[0], {"ok": True})
    finally:
        if not done:
            os.unlink(temporary, dir_fd=place)


def entry(path: str, name: str) -> list[Any]:
    info = os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    return [name, info.st_mode, info.st_size, info.st_mtime, target]


def call_stat(message: Message, fds: Fds) -> None:
    send(fds[0], {"entry": entry(message["path"], os.path.basename(message["path"].rstrip("/")) or "/")})


def call_list(message: Message, fds: Fds) -> None:
    path = message["path"]
    out = os.fdopen(fds[2], "w", encoding="utf-8", errors="strict")
    with os.scandir(path) as found:
        for item in found:
            try:
                out.write(json.dumps(entry(item.path, item.name)) + "\n")
            except FileNotFoundError:
                continue  # went away meanwhile
    out.close()
    send(fds[0], {"ok": True})


def call_make_dir(message: Message, fds: Fds) -> None:
    try:
        os.makedirs(message["path"], 0o755, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    send(fds[0], {"ok": True})


def call_remove(message: Message, fds: Fds) -> None:
    path = message["path"].rstrip("/") or "/"
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        os.unlink(path)
    elif not message["recursive"]:
        os.rmdir(path)
    else:
        parent = os.open(os.path.dirname(path) or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        remove_tree(parent, os.path.basename(path))
    send(fds[0], {"ok": True})


def remove_tree(parent: int, name: str) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with os.scandir(fd) as found:
            items = [(item.name, item.is_dir(follow_symlinks=False)) for item in found]
        for child, folder in items:
            if folder:
                remove_tree(fd, child)
            else:
                os.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


tarfile: Any = None  # the module, once a tree was asked for
Tree: Any = None


def load_tarfile() -> None:
    global tarfile, Tree
    if tarfile is not None:
        return
    import tarfile as module

    # Names of users come from libraries that glibc would load inside, from the sandbox. Ids are enough.
    vars(module).update(pwd=None, grp=None)

    class OwnTree(module.TarFile):
        def chown(self, *args: object, **kwargs: object) -> None:
            """What is unpacked belongs to the sandbox's user."""

        def makedev(self, member: object, path: object) -> None:
            raise module.ExtractError("devices cannot be made in a sandbox")

    tarfile, Tree = module, OwnTree


def call_read_tree(message: Message, fds: Fds) -> None:
    path = message["path"]
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    with (
        os.fdopen(fds[2], "wb", buffering=1 << 18) as out,
        Tree.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar,
    ):
        pack(tar, path, "", os.stat(path).st_dev)
    send(fds[0], {"ok": True})


def pack(tar: Any, path: str, inner: str, device: int) -> None:
    with os.scandir(path) as found:
        names = sorted(item.name for item in found)
    for name in names:
        full, arcname = f"{path}/{name}", f"{inner}/{name}" if inner else name
        try:
            info = os.lstat(full)
            mode = info.st_mode
            if stat.S_ISDIR(mode) and info.st_dev != device:
                continue  # a mount: this machine's Python, /proc
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                continue
            member = tar.gettarinfo(full, arcname)
        except FileNotFoundError:
            continue
        if member is None:
            continue
        member.uid = member.gid = 0
        if not member.isreg():
            tar.addfile(member)
            if member.isdir():
                pack(tar, full, arcname, device)
            continue
        fd = open_regular(full, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            member.size = size
            tar.addfile(member, Padded(file, size))


class Padded:
    """A file that may shrink while it is packed: the archive stays whole."""

    def __init__(self, file: Any, size: int) -> None:
        self.file, self.left = file, size

    def read(self, count: int) -> bytes:
        count = min(count, self.left)
        data: bytes = self.file.read(count)
        self.left -= count
        return data + bytes(count - len(data))


def call_write_tree(message: Message, fds: Fds) -> None:
    os.makedirs(message["path"], 0o755, exist_ok=True)
    os.chdir(message["path"])
    try:
        with os.fdopen(fds[2], "rb", buffering=1 << 18) as source:
            with Tree.open(fileobj=source, mode="r|", errors="surrogateescape", errorlevel=1) as tar:
                tar.extraction_filter = staticmethod(lambda member, _path: member)
                for member in tar:
                    name = os.path.normpath("/" + member.name).lstrip("/")
                    if not name:
                        continue
                    member.name = name
                    if member.ischr() or member.isblk():
                        continue
                    tar.extract(member, ".", set_attrs=True)
            while source.read(1 << 18):
                pass
    except tarfile.TarError as error:
        raise OSError(errno.EINVAL, f"not a whole tar archive: {error}") from None
    send(fds[0], {"ok": True})


def call_sockets(message: Message, fds: Fds) -> None:
    """Unconnected sockets of the sandbox's network, to be connected from outside."""
    made = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            made.append(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        except OSError:
            continue
    send(fds[0], {"ok": True}, [s.fileno() for s in made])


CALLS = {
    "read": call_read,
    "write": call_write,
    "stat": call_stat,
    "list": call_list,
    "make_dir": call_make_dir,
    "remove": call_remove,
    "read_tree": call_read_tree,
    "write_tree": call_write_tree,
    "sockets": call_sockets,
}


# ---------------------------------------------------------------- ending a process tree


def terminate_tree(message: Message, fds: Fds) -> int:
    """Fork one that goes into the process namespace and ends what carries the mark, and its children.

    It keeps the capabilities of the sandbox's own user namespace, because a process may have made
    itself unreadable; it runs nothing of the sandbox.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        enter(fds[1], [], message["flags"])
        inside = os.fork()
        if inside == 0:
            end_tree(f"{MARKER}={message['mark']}".encode(), message["grace"])
            os._exit(0)
        os.waitpid(inside, 0)
        send(fds[0], {"ok": True})
    except BaseException as error:
        failure(fds[0], error)
    finally:
        os._exit(0)


def end_tree(mark: bytes, grace: float) -> None:
    deadline = time.monotonic() + grace
    known: set[tuple[int, bytes]] = set()
    told: set[tuple[int, bytes]] = set()
    last = time.monotonic() + grace + 30
    while time.monotonic() < last:
        known = marked(mark, known)
        if not known:
            return
        late = time.monotonic() >= deadline
        for process in known:
            if late or process not in told:
                told.add(process)
                try:
                    os.kill(process[0], signal.SIGKILL if late else signal.SIGTERM)
                    if not late:
                        os.kill(process[0], signal.SIGCONT)
                except ProcessLookupError:
                    pass
        time.sleep(0.005 if late else 0.01)


def marked(mark: bytes, known: set[tuple[int, bytes]]) -> set[tuple[int, bytes]]:
    """Live processes that carry the mark or descend from one that does or did."""
    own = str(os.getpid())
    living: dict[int, tuple[int, bytes]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == own:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                fields = file.read(4096).rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in b"ZX":
            living[int(name)] = (int(fields[1]), fields[19])
    found = {pid for pid, (_, start) in living.items() if (pid, start) in known}
    for pid in living:
        if pid in found or pid == 1:
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                if mark in file.read(1 << 21).split(b"\0"):
                    found.add(pid)
        except OSError:
            continue
    grown = True
    while grown:
        grown = False
        for pid, (parent, _) in living.items():
            if pid not in found and parent in found:
                found.add(pid)
                grown = True
    return {(pid, living[pid][1]) for pid in found}


# ---------------------------------------------------------------- messages and the loop


def send(sock: int, message: Message, fds: Fds = []) -> None:  # noqa: B006
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    out = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, os.dup(sock))
    with out, contextlib.suppress(OSError):  # nobody waits for it any more
        out.sendmsg([json.dumps(message).encode()], ancillary, socket.MSG_NOSIGNAL)


def failure(sock: int, error: BaseException) -> None:
    code = error.errno if isinstance(error, OSError) else None
    send(sock, {"errno": code or errno.EIO, "why": f"{error}"})


def complain(fd: int, error: BaseException) -> None:
    if isinstance(error, OSError) and error.filename:
        text = f"lowtide: {os.fsdecode(error.filename)}: {error.strerror}\n"
    else:
        text = f"lowtide: {error}\n"
    with contextlib.suppress(OSError):
        os.write(fd, text.encode("utf-8", "surrogateescape"))


def receive(control: socket.socket) -> tuple[Message, Fds] | None:
    data, ancillary, _, _ = control.recvmsg(65536, 1024, socket.MSG_CMSG_CLOEXEC)
    fds: Fds = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.extend(array.array("i", payload))
    if not data:
        return None
    if data == b"M":  # too long for one packet: it is in a memory file
        with os.fdopen(fds.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return json.loads(data), fds


class Spawner:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.poller = select.epoll()
        self.births_r, self.births_w = os.pipe()
        self.creations: dict[int, Creation] = {}
        self.spare: Spare | None = None
        self.firsts: dict[int, int] = {}  # pid of the one that enters -> key
        self.processes: dict[int, int] = {}  # pid of a command -> key
        self.replies: dict[int, int] = {}  # key -> reply socket
        self.pids: dict[int, int] = {}  # key -> pid of the command
        self.early: dict[int, int] = {}  # exits seen before the births

    def run(self) -> None:
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        os.set_blocking(self.births_r, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        control = self.control.fileno()
        for fd in (wake_r, self.births_r, control):
            self.poller.register(fd, select.EPOLLIN)
        while True:
            waiting = self.spare is None and config.elf_fd >= 0 and not self.creations
            events = self.poller.poll(_QUIET_SECONDS if waiting else -1)
            if not events and waiting:
                self.spare = Spare()
            for fd, _ in events:
                if fd == control:
                    request = receive(self.control)
                    if request is None:
                        return
                    self.handle(*request)
                elif fd == wake_r:
                    try:
                        while os.read(wake_r, 4096):
                            pass
                    except BlockingIOError:
                        pass
                    self.reap()
                elif fd == self.births_r:
                    self.take_births()
                elif fd in self.creations:
                    self.poller.unregister(fd)
                    self.creations.pop(fd).advance()

    def handle(self, message: Message, fds: Fds) -> None:
        op = message["op"]
        keep: list[int] = []
        try:
            if op == "configure":
                send(fds[0], configure(message, fds))
            elif op == "create":
                creation = Creation(message, fds, self.spare)
                self.spare = None
                keep = fds
                self.creations[creation.info_r] = creation
                self.poller.register(creation.info_r, select.EPOLLIN)
            elif op == "exec":
                key = message["key"]
                if config.base is not None:
                    self.pids[key] = pid = start_process_as_root(message, fds)
                    self.processes[pid] = key
                else:
                    self.firsts[start_process(message, fds, self.births_w, key)] = key
                self.replies[key] = fds[0]
                keep = fds[:1]
            elif op == "call":
                call_inside(message, fds)
            elif op == "stage":
                send(fds[0], stage_more(message["tree"]))
            elif op == "signal":
                self.signal(message["key"], message["number"])
            elif op == "terminate":
                terminate_tree(message, fds)
        except (OSError, KeyError, ValueError) as error:
            if fds:
                failure(fds[0], error)
        finally:
            for fd in fds:
                if fd not in keep:
                    os.close(fd)

    def signal(self, key: int, number: int) -> None:
        pid = self.pids.get(key)
        if pid is None:
            return
        try:
            os.killpg(pid, number)
        except OSError:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def take_births(self) -> None:
        try:
            data = os.read(self.births_r, 4096)
        except BlockingIOError:
            return
        for key, pid in struct.iter_unpack("qq", data):
            self.pids[key] = pid
            if pid in self.early:
                self.ended(key, self.early.pop(pid))
            else:
                self.processes[pid] = key

    def reap(self) -> None:
        self.take_births()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.processes:
                self.ended(self.processes.pop(pid), status)
            elif pid in self.firsts:
                key = self.firsts.pop(pid)
                self.take_births()
                if key in self.replies and key not in self.pids:
                    os.close(self.replies.pop(key))  # it has said why, or was killed
            else:
                self.early[pid] = status
                self.take_births()
                if len(self.early) > 64:
                    self.early.pop(next(iter(self.early)))

    def ended(self, key: int, status: int) -> None:
        self.pids.pop(key, None)
        reply = self.replies.pop(key, None)
        if reply is not None:
            code = os.waitstatus_to_exitcode(status)
            send(reply, {"exit": code if code >= 0 else 128 - code})
            os.close(reply)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    # What the embedding program left inheritable is not for sandboxes.
    os.closerange(3, control.fileno())
    libc.syscall(SYS_CLOSE_RANGE, control.fileno() + 1, 0x7FFFFFFF, 0)
    os.set_inheritable(control.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.setsid()
    import gc

    gc.disable()
    gc.freeze()
    Spawner(control).run()


if __name__ == "__main__":
    main()
