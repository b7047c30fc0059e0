"""`lowtide shell` on a real terminal: raw keys, Ctrl+C inside, the window's size, the exit code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator

import pytest
from cli_process import LOWTIDE, Cli, cli  # noqa: F401 (fixture)


class Terminal:
    """A person at a terminal: types, reads, resizes."""

    def __init__(self, environ: dict[str, str], *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(LOWTIDE[0], [*LOWTIDE, *arguments], environ)
        self.seen = ""
        self._taken = 0

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Read until it appears in what came after the last match."""
        deadline = time.monotonic() + seconds
        while True:
            found = re.compile(pattern).search(self.seen, self._taken)
            if found:
                self._taken = found.end()
                return found
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.seen[self._taken :]!r}"
            if select.select([self.fd], [], [], min(left, 0.5))[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError as error:
                    raise AssertionError(f"ended without {pattern!r}: {self.seen!r}") from error

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self.fd], [], [], 0.05)[0]:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"still running: {self.seen!r}")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(cli: Cli) -> Iterator[Terminal]:  # noqa: F811
    person = Terminal({**cli.environ, "TERM": "dumb", "PS1": "$ "}, "shell", "--env", "PS1=$ ")
    yield person
    person.close()


def test_a_shell_has_a_terminal_and_returns_its_exit_code(cli: Cli, terminal: Terminal) -> None:  # noqa: F811
    terminal.type("test -t 0 && test -t 1 && echo is-a-'terminal'\r")
    terminal.expect("is-a-terminal")
    terminal.type("exit 7\r")
    assert terminal.wait() == 7
    assert cli.ids() == []


def test_ctrl_c_ends_what_runs_inside_and_not_the_shell(terminal: Terminal) -> None:
    terminal.type("echo be'gun'; sleep 300\r")
    terminal.expect("begun")
    time.sleep(0.2)
    terminal.type("\x03")
    terminal.type("echo code=$?\r")
    assert terminal.expect(r"code=(\d+)")[1] == "130"
    terminal.type("exit\r")
    terminal.wait()


def test_the_size_of_the_window_follows(terminal: Terminal) -> None:
    terminal.type("echo rea'dy'\r")
    terminal.expect("ready")
    terminal.resize(41, 101)
    deadline = time.monotonic() + 30
    while True:
        terminal.type("echo size $(stty size) end\r")
        if terminal.expect(r"size (\d+ \d+) end")[1] == "41 101" or time.monotonic() > deadline:
            break
    assert "size 41 101 end" in terminal.seen
    terminal.type("exit\r")
    assert terminal.wait() == 0


def test_control_d_leaves_and_the_terminal_is_as_before(cli: Cli) -> None:  # noqa: F811
    # A shell around ours, so that the terminal outlives it and can be looked at.
    script = f"stty -g; {' '.join(LOWTIDE)} shell; echo left=$?; stty -g; echo done"
    pid, fd = pty.fork()
    if pid == 0:
        os.execvpe("sh", ["sh", "-c", script], {**cli.environ, "TERM": "dumb"})
    person = Terminal.__new__(Terminal)
    person.pid, person.fd, person.seen, person._taken = pid, fd, "", 0
    try:
        before = person.expect(r"([0-9a-f:]{20,})\r?\n")[1]
        person.expect(r"[#$] ")
        person.type("\x04")
        assert person.expect(r"left=(\d+)")[1] == "0"
        assert person.expect(r"([0-9a-f:]{20,})\r?\n")[1] == before
        person.expect("done")
        assert person.wait() == 0
    finally:
        person.close()


def test_a_shell_in_a_sandbox_that_exists(cli: Cli) -> None:  # noqa: F811
    cli("run", "--keep", "always", "--", "sh", "-c", "echo mine >/root/mark")
    (sandbox_id,) = cli.ids()
    person = Terminal({**cli.environ, "TERM": "dumb"}, "shell", sandbox_id)
    try:
        person.type("cat /root/mark\r")
        person.expect(r"\nmine")
        person.type("exit\r")
        person.wait()
        assert cli.ids() == [sandbox_id]
    finally:
        person.close()
        cli("rm", sandbox_id)
