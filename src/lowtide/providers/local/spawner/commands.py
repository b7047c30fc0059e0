"""Running a command in a sandbox: the fork that enters, its terminal, its user, its program."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
import termios

from .config import config
from .end_tree import wear
from .kernel import CLONE_PARENT, NEWPID, SYS_CLONE, TIOCGPTPEER, TIOCSPTLCK, check, libc
from .restrictions import default_signals, enter, restrict
from .wire import Fds, Message, complain, failure, send


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


def is_paused(place: int) -> bool:
    """Called by a process of the sandbox before its program begins. A pause writes the record first and then looks for
    processes, so that either the process sees the record or the pause finds the process.

    `place` is the sandbox's directory.
    """
    return "paused" in os.listdir(place)


def run_command(message: Message, fds: Fds) -> None:
    _, _, place, *stdio = fds
    trouble = -1
    try:
        if not message.get("whole") and is_paused(place):
            send(fds[0], {"paused": True})
            os._exit(126)
        os.setsid()
        if message["tty"]:
            stdio = terminal(message["tty"], fds[0])
        for target, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in stdio]):
            os.dup2(fd, target, inheritable=True)
        trouble = 126
        if message.get("whole"):
            run_whole(message)
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
        try:
            os.chdir(message["cwd"])
        except OSError as error:  # 126, as everywhere: the command itself may well be there
            raise OSError(error.errno, error.strerror, message["cwd"], None, "found") from None
        wear(message["mark"])
        default_signals()
        execute(message["argv"], {os.fsencode(k): os.fsencode(v) for k, v in environment.items()})
    except NoSuchUser:
        send(fds[0], {"no_user": message["user"]})
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


def run_whole(message: Message) -> None:
    """A program of this machine's in the namespaces, with every right over them: for what holds gVisor's container."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.chdir("/")
    default_signals()
    execute(message["argv"], {})


def execute(argv: list[str], environment: dict[bytes, bytes]) -> None:
    arguments = [os.fsencode(a) for a in argv]
    name = arguments[0]
    refused: OSError | None = None
    for candidate in candidates(name, environment):
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


def candidates(name: bytes, environment: dict[bytes, bytes]) -> list[bytes]:
    if b"/" in name:
        return [name]
    path = environment.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin")
    return [(part or b".") + b"/" + name for part in path.split(b":")]


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


class NoSuchUser(Exception):
    """Not in the sandbox's own /etc/passwd: an error of whoever asked, and no exit code of the command's."""


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
    raise NoSuchUser(name)


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
