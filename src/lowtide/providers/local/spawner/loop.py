"""The spawner's loop: takes requests, forks, reaps, reports."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import struct
import time

from . import inheritance
from .calls import call_inside
from .command_starter import start_command_starter
from .commands import start_process, start_process_as_root
from .config import config
from .create import Spare
from .end_tree import terminate_tree
from .free_disk import FreeDisk
from .kernel import SYS_CLOSE_RANGE, libc, put
from .set_up import configure, stage_more
from .wire import Cut, Fds, Message, failure, receive, send


class Spawner:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.poller = select.epoll()
        self.births_r, self.births_w = os.pipe()
        self.firsts: dict[int, int] = {}  # pid of the one that enters -> key
        self.processes: dict[int, int] = {}  # pid of a command -> key
        self.replies: dict[int, int] = {}  # key -> reply socket
        self.pids: dict[int, int] = {}  # key -> pid of the command
        self.room = FreeDisk()
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
        serving = True
        # Its commands are its children. When the owner is gone it stays to reap them: a sandbox is dead only
        # when the last zombie in it is reaped, and the machine's init may take a second or more for that.
        while serving or self.processes or self.firsts:
            for fd, _ in self.poller.poll(self.room.wait_seconds() if serving else -1):
                if fd == control:
                    try:
                        request = receive(self.control)
                    except Cut as cut:
                        self.refuse(cut)
                        continue
                    if request is None:
                        serving = False
                        self.poller.unregister(control)
                        continue
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
            self.room.look()

    def refuse(self, cut: Cut) -> None:
        """The first descriptor of a request is where it is answered."""
        if cut.fds:
            self.answer_failure(cut.fds[0], OSError(errno.EMFILE, "no descriptor is left for this request"))
        for fd in cut.fds:
            os.close(fd)

    def answer_failure(self, reply: int, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # closing it is the answer then
            failure(reply, error)

    def handle(self, message: Message, fds: Fds) -> None:
        op = message["op"]
        keep: list[int] = []
        try:
            if op == "configure":
                send(fds[0], configure(message, fds))
            elif op == "create":
                Spare().take(message, fds[1:])
            elif op == "spare":
                spare = Spare()
                with spare.ours:
                    send(fds[0], {"ok": True}, [spare.ours.fileno()])
            elif op == "exec":
                key = message["key"]
                if config.base is not None:
                    self.pids[key] = pid = start_process_as_root(message, fds)
                    self.processes[pid] = key
                else:
                    self.firsts[start_process(message, fds, self.births_w, key)] = key
                self.replies[key] = fds[0]
                keep = fds[:1]
            elif op == "command_starter":
                start_command_starter(message, fds)
            elif op == "call":
                call_inside(message, fds)
            elif op == "stage":
                send(fds[0], stage_more(message["tree"]))
            elif op == "signal":
                self.signal(message["key"], message["number"])
            elif op == "terminate":
                terminate_tree(message, fds)
        except Exception as error:  # one request must not end what serves all sandboxes
            if fds:
                self.answer_failure(fds[0], error)
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
                pid, status = 0, 0
            if pid == 0:
                if not self.firsts:
                    self.early.clear()  # all births are known: these are others', and a number comes back one day
                return
            if pid in self.processes:
                self.ended(self.processes.pop(pid), status)
            elif pid in self.firsts:
                key = self.firsts.pop(pid)
                self.take_births()
                if key in self.replies and key not in self.pids:
                    os.close(self.replies.pop(key))  # it has said why, or was killed
            elif pid == self.room.child:
                self.room.child = 0
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
            with contextlib.suppress(OSError):
                send(reply, {"exit": code if code >= 0 else 128 - code})
            os.close(reply)


def main(fd: int) -> None:
    control = socket.socket(fileno=fd)
    # What the embedding program left inheritable is not for sandboxes.
    os.closerange(3, control.fileno())
    libc.syscall(SYS_CLOSE_RANGE, control.fileno() + 1, 0x7FFFFFFF, 0)
    os.set_inheritable(control.fileno(), False)
    inheritance.lay_down()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.setsid()
    gc.disable()
    gc.freeze()
    Spawner(control).run()
    leave_bound()


def leave_bound() -> None:
    """Take the groups away, unless sandboxes live on in them: whoever ends the last one finds them empty."""
    for _, origin in config.bound:
        with contextlib.suppress(OSError):
            put(f"{origin}/cgroup.procs", b"0")
    outer = [os.path.dirname(group) for group, _ in config.bound]
    for _ in range(50):  # what waited for work here leaves at the same time
        for path in [group for group, _ in config.bound] + outer:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        if not any(map(os.path.exists, outer)):
            return
        time.sleep(0.01)
