"""The command starter: waits outside one sandbox and starts commands in it without a fork of this program.

It has joined the sandbox and restricted itself once, as every command's process would have to; each
command is then one `posix_spawn`, which shares memory with it until the program is executed. It is not in
the sandbox's process namespace (only its children are), so nothing in there sees it or can touch it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import stat

from .commands import candidates, is_paused
from .end_tree import wear
from .kernel import SYS_CLOSE_RANGE, libc
from .restrictions import enter, restrict
from .wire import Cut, Fds, Message, complain, failure, receive, send

_DEFAULTED = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGCHLD,
    signal.SIGALRM,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)


def start_command_starter(message: Message, fds: Fds) -> None:
    if os.fork():
        return
    try:
        sock = fds[0]
        keep = sorted({0, 1, 2, *fds})
        for low, high in zip(keep, [*keep[1:], 0x80000000], strict=True):
            if low + 1 <= high - 1:
                libc.syscall(SYS_CLOSE_RANGE, low + 1, high - 1, 0)
        signal.set_wakeup_fd(-1)
        line = socket.socket(fileno=sock)
        if len(fds) == 1:  # made before it is known for which sandbox
            told = receive(line)
            if told is None:
                return
            message, fds = told[0], [sock, *told[1]]
        enter(fds[1], [], message["flags"])
        restrict(0, 0, message["nproc"])
        CommandStarter(line, fds[1]).run()
    except BaseException as error:
        failure(fds[0], error)
    finally:
        os._exit(0)


class CommandStarter:
    def __init__(self, sock: socket.socket, inner: int) -> None:
        self.sock, self.inner = sock, inner
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        self.poll.register(inner, select.POLLIN)
        self.running: dict[int, tuple[int, int, int]] = {}  # pidfd -> pid, key, reply socket
        self.serving = True
        self.usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.usual[1], self.usual[1]))

    def run(self) -> None:
        # When nobody asks any more it stays for what it has started, because only it can reap that.
        while self.serving or self.running:
            for fd, _ in self.poll.poll():
                if fd in self.running:
                    self.ended(fd)
                elif fd == self.inner:
                    self.poll.unregister(fd)  # the sandbox is dead
                    self.stop_serving()
                elif self.serving:
                    try:
                        request = receive(self.sock)
                    except Cut as cut:
                        self.refuse(cut)
                        continue
                    if request is None:
                        self.stop_serving()
                    elif request[0]["op"] == "signal":
                        self.signal(request[0]["key"], request[0]["number"])
                    else:
                        self.start(*request)

    def stop_serving(self) -> None:
        if self.serving:
            self.serving = False
            self.poll.unregister(self.sock)
            self.sock.close()

    def refuse(self, cut: Cut) -> None:
        if cut.fds:
            with contextlib.suppress(OSError):
                failure(cut.fds[0], OSError(errno.EMFILE, "no descriptor is left for this command"))
        for fd in cut.fds:
            os.close(fd)

    def start(self, message: Message, fds: Fds) -> None:
        reply, place, *stdio = fds
        try:
            fcntl.flock(place, fcntl.LOCK_SH)  # a pause waits until the process exists
            pid = "paused" if is_paused(place) else self.spawn(message, stdio)
            fcntl.flock(place, fcntl.LOCK_UN)
            if pid == "paused":
                send(reply, {"paused": True})
                os.close(reply)
            elif isinstance(pid, str):
                send(reply, {"exit": 127 if pid == "missing" else 126})
                os.close(reply)
            else:
                pidfd = os.pidfd_open(pid)
                self.running[pidfd] = (pid, message["key"], reply)
                self.poll.register(pidfd, select.POLLIN)
        except OSError as error:
            if error.errno == errno.ENOMEM:  # what the kernel says of a process namespace that is ending
                error = ProcessLookupError(errno.ESRCH, "the sandbox is gone")
            failure(reply, error)
            os.close(reply)
        finally:
            for fd in (place, *stdio):
                os.close(fd)

    def spawn(self, message: Message, stdio: Fds) -> int | str:
        """The process, or why the command cannot be run; then the reason is on its stderr."""
        environment = {os.fsencode(k): os.fsencode(v) for k, v in message["env"].items()}
        arguments = [os.fsencode(a) for a in message["argv"]]
        refused: OSError | None = None
        try:
            wear(message["mark"])
            try:
                os.chdir(message["cwd"])
            except OSError as error:
                complain(stdio[2], error)
                return "refused"  # 126, as everywhere: the command itself may well be there
            for candidate in candidates(arguments[0], environment):
                try:
                    resource.setrlimit(
                        resource.RLIMIT_NOFILE, self.usual
                    )  # the command's, not this program's
                    return os.posix_spawn(
                        candidate,
                        arguments,
                        environment,
                        file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(stdio)],
                        setsid=True,
                        setsigmask=(),
                        setsigdef=_DEFAULTED,
                    )
                except OSError as error:
                    if error.errno in (errno.EAGAIN, errno.ENOMEM):
                        raise
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR) or exists(candidate):
                        refused = refused or error
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (self.usual[1], self.usual[1]))
            name = os.fsdecode(arguments[0])
            if refused is not None:
                complain(stdio[2], OSError(refused.errno, os.strerror(refused.errno or 0), name))
                return "refused"
            complain(stdio[2], FileNotFoundError(errno.ENOENT, "command not found", name))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOMEM):
                raise
            complain(stdio[2], error)
            return "missing" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "refused"
        return "missing"

    def signal(self, key: int, number: int) -> None:
        for pid, its_key, _ in self.running.values():
            if its_key == key:
                try:
                    os.killpg(pid, number)
                except OSError:
                    os.kill(pid, number)

    def ended(self, pidfd: int) -> None:
        pid, _, reply = self.running.pop(pidfd)
        self.poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            send(reply, {"exit": code if code >= 0 else 128 - code})
        os.close(reply)


def exists(path: bytes) -> bool:
    """A script whose interpreter is missing is there all the same."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
