"""One session's bash on a pseudo-terminal, and the thread that reads it."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import struct
import termios
import threading
import time

from lowtide.actionserver.processes import end_session, runs_since
from lowtide.actionserver.shell import COLUMNS, ENVIRONMENT, KEYS, ROWS, START_SECONDS, Outcome, Shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_READ = 1 << 16
_PRESS_SECONDS, _SETTLED_SECONDS = 3.0, 1.0
_LONGEST_LINE = 4095
_FAILED_STARTS = 3
"""So often bash may end before its first prompt; then its start-up files are at fault."""
_LINE_BYTES = 1024
"""At a time into the terminal, so that a write never blocks once there is room."""


class NoShell(RuntimeError):
    """bash could not be started."""


class InputFull(RuntimeError):
    """More input than the terminal holds, for a command that does not read. Status 409."""


class Terminal:
    """A session: commands go in one at a time, from any thread."""

    def __init__(self, directory: str, cwd: str, environment: dict[str, str]) -> None:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.shell = Shell(directory, os.urandom(12).hex(), cwd)
        self._environment = {**environment, **ENVIRONMENT}
        self._changed = threading.Condition()
        self._reader = 0
        """The number of the request that waits for output: a newer one takes over from it."""
        self._waiting = 0
        self._closed = False
        self._listeners: list[Callable[[bytes], None]] = []
        self._master = self._slave = -1
        self._pid = -1
        self._start()
        threading.Thread(target=self._read, name="terminal", daemon=True).start()

    @property
    def running(self) -> str | None:
        return self.shell.command

    @property
    def closed(self) -> bool:
        return self._closed

    def run(
        self,
        command: str,
        *,
        soft: float | None,
        hard: float | None,
        listener: Callable[[bytes], None] | None = None,
    ) -> Outcome:
        """Start it and wait. When one runs already, an outcome that says it was refused."""
        with self._changed:
            self._wait_for_prompt()
            if self.shell.command is not None:
                return self.shell.refused(command, time.monotonic(), watched=self._waiting > 0)
            self._sane()
            content = self.shell.begin(command, time.monotonic())
            try:
                # Again: what runs here may have tidied up all of /tmp.
                os.makedirs(self.shell.directory, mode=0o700, exist_ok=True)
                _write_file(f"{self.shell.directory}/command", content)
            except OSError:
                self.shell.take_back()
                raise
            self._write(self.shell.line)
            return self._wait(soft, hard, listener)

    def read_on(
        self, *, soft: float | None, hard: float | None, listener: Callable[[bytes], None] | None = None
    ) -> Outcome | None:
        """Wait for more of the running command. None when there is none."""
        with self._changed:
            if not self.shell.pending:
                return None
            return self._wait(soft, hard, listener)

    def send(
        self,
        keys: str,
        *,
        soft: float | None,
        hard: float | None,
        listener: Callable[[bytes], None] | None = None,
    ) -> Outcome | None:
        """A line or a key for the running command, then wait for what it does. None when there is none."""
        with self._changed:
            if not self.shell.pending:
                return None
            if self.shell.command is None:
                return self._wait(soft, hard, listener)
            typed = KEYS[keys] if keys in KEYS else keys.encode("utf-8", "surrogateescape") + b"\n"
            self._check_lines(typed)
            if typed == KEYS["C-c"]:
                self._press_interrupt()
            else:
                self._write(typed)
            if self._waiting:  # whoever waits sees what comes of it
                return self.shell.taken_over(time.monotonic())
            return self._wait(soft, hard, listener)

    def interrupt(self, grace_seconds: float) -> bool:
        """End the running command: Ctrl+C, then TERM and KILL to its process group. False when none runs."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with self._changed:
                if self.shell.command is None:
                    return number is not signal.SIGINT
                if number is not signal.SIGINT:
                    self._signal_foreground(number)
                self._press_interrupt()  # each time: of a loop, a signal ends one round alone
                self._changed.wait_for(lambda: self.shell.command is None, grace_seconds)
        return True

    def close(self, grace_seconds: float) -> None:
        """End bash and all that was started in its session."""
        with self._changed:
            self._closed = True
            pid = self._pid
        end_session(pid, grace_seconds)
        shutil.rmtree(self.shell.directory, ignore_errors=True)

    def _wait(
        self, soft: float | None, hard: float | None, listener: Callable[[bytes], None] | None
    ) -> Outcome:
        since = time.monotonic()
        self._reader += 1
        mine = self._reader
        self._waiting += 1
        self._changed.notify_all()
        if listener is not None:
            self._listeners.append(listener)
        try:
            while True:
                now = time.monotonic()
                if mine != self._reader:
                    return self.shell.taken_over(now)
                outcome = self.shell.outcome(now, since, soft, hard)
                if outcome is not None:
                    return outcome
                due = self.shell.due(since, soft, hard)
                self._changed.wait(None if due is None else max(0.0, due - now))
        finally:
            self._waiting -= 1
            if listener is not None:
                self._listeners.remove(listener)

    def _wait_for_prompt(self) -> None:
        ready = self._changed.wait_for(
            lambda: self.shell.at_prompt or self.shell.command is not None or self._closed, START_SECONDS
        )
        if not ready:
            raise NoShell(f"bash gave no prompt within {START_SECONDS:g} seconds; look at its start-up files")
        if self._closed:
            raise NoShell("bash ended before its first prompt; look at its start-up files")

    def _start(self) -> None:
        directory = self.shell.directory
        bash = shutil.which("bash", path=self._environment.get("PATH")) or "/bin/bash"
        if not os.path.exists(bash):
            raise NoShell("there is no bash in this image; install it, e.g. apt-get install bash")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        _write_file(f"{directory}/rc", self.shell.rc())
        master, slave = os.openpty()
        _set_modes(slave)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        name = os.ttyname(slave)
        # Opened as a session's first terminal, so that it becomes the controlling one.
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]
        self._pid = os.posix_spawn(
            bash,
            list(self.shell.argv()),
            self._environment,
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM],
        )
        self._master, self._slave = master, slave

    def _read(self) -> None:
        """The session's thread: everything the terminal says, and a new bash whenever one has ended."""
        failed = 0
        while True:
            status = self._read_until_end()
            with self._changed:
                failed = 0 if self.shell.welcomed else failed + 1
                orderly = self.shell.ended(status, time.monotonic())
                os.close(self._master)
                os.close(self._slave)
                self._master = self._slave = -1
                if self._closed or failed >= _FAILED_STARTS:
                    self._closed = True
                    self._changed.notify_all()
                    return
                state, restore = (f"{self.shell.directory}/{name}" for name in ("state", "restore"))
                try:
                    os.replace(state, restore) if orderly else os.unlink(restore)
                except OSError:
                    pass
                try:
                    self._start()
                except (OSError, NoShell):
                    self._closed = True
                self._changed.notify_all()
                if self._closed:
                    return

    def _read_until_end(self) -> int:
        """Blocking reads, one call for each piece: what a terminal hands over is small, and its rate counts.

        A background job may hold the terminal for ever, so its end does not tell that bash has ended: the
        reaper says it, through the terminal, behind the last byte that bash wrote.
        """
        statuses: list[int] = []
        reaper = threading.Thread(target=self._reap, args=(statuses,), name="reaper", daemon=True)
        reaper.start()
        while not self.shell.over:
            try:
                data = os.read(self._master, _READ)
            except OSError:
                break
            with self._changed:
                before = self.shell.at_prompt
                output = self.shell.feed(data, time.monotonic())
                if output:
                    for listener in self._listeners:
                        listener(output)
                # Output alone wakes nobody: the one who waits looks again when its time is due.
                if self.shell.at_prompt and not before:
                    self._changed.notify_all()
        reaper.join()
        return statuses[0]

    def _reap(self, statuses: list[int]) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        statuses.append(128 - code if code < 0 else code)
        try:
            os.write(self._slave, self.shell.end_mark())
        except OSError:
            pass  # the kernel has hung it up: then the reading ends by itself

    def _write(self, data: bytes) -> None:
        while data:
            try:
                ready = select.poll()  # select() ends at descriptor 1,024
                ready.register(self._master, select.POLLOUT)
                if not ready.poll(0):
                    raise InputFull("the command reads none of its input, and no more fits")
                data = data[os.write(self._master, data[:_LINE_BYTES]) :]
            except (OSError, ValueError):
                return  # bash has ended; its outcome says so

    def _check_lines(self, data: bytes) -> None:
        """A terminal that hands over whole lines drops what of a longer one does not fit."""
        longest = max(map(len, data.split(b"\n")))
        try:
            whole_lines = termios.tcgetattr(self._master)[3] & termios.ICANON
        except termios.error:
            return
        if whole_lines and longest >= _LONGEST_LINE:
            raise InputFull(
                f"a line of input may have {_LONGEST_LINE - 1} bytes at most; put it into a file, and let the "
                "command read that"
            )

    def _sane(self) -> None:
        """What a full-screen program may have left the terminal with is undone before each command."""
        try:
            _set_modes(self._master)
        except termios.error:
            pass

    def _press_interrupt(self) -> None:
        """Ctrl+C. While bash starts the next process of a loop it reaches nobody: the last one has ended, or the new
        one is not yet its own program. Then it is pressed again; never at what ran and takes it as it likes."""
        until = time.monotonic() + _PRESS_SECONDS
        pressed = 0
        while self.shell.command is not None and time.monotonic() < until:
            group = self._foreground()
            own = group == self._pid  # bash itself, which may be about to start the next one
            if own or group != pressed:
                listens = not own and runs_since(group, _SETTLED_SECONDS)
                self._write(KEYS["C-c"])
                if listens:
                    return
                pressed = group
            self._changed.wait_for(lambda: self.shell.command is None, 0.3 if own else 0.1)

    def _foreground(self) -> int:
        try:
            return os.tcgetpgrp(self._master)
        except OSError:
            return self._pid  # it has ended

    def _signal_foreground(self, number: int) -> None:
        try:
            group = self._foreground()
            if group != self._pid:
                os.killpg(group, number)
            elif number is signal.SIGKILL:
                os.kill(self._pid, number)
        except (OSError, ProcessLookupError):
            pass


def _set_modes(descriptor: int) -> None:
    """Output passes unchanged (a translated one is forty times slower), input is not echoed."""
    modes = termios.tcgetattr(descriptor)
    modes[0] = termios.ICRNL | termios.IUTF8 if hasattr(termios, "IUTF8") else termios.ICRNL
    modes[1] &= ~termios.OPOST
    modes[3] = termios.ICANON | termios.ISIG | termios.IEXTEN
    termios.tcsetattr(descriptor, termios.TCSANOW, modes)


def _write_file(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
