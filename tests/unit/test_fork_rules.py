"""lowtide never forks a process that has threads: Python warns of it from 3.12 on, and the child may hang."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Python tells an audit hook of every os.fork(), whatever its version.
FORKS = """
import sys
forks = []
sys.addaudithook(lambda event, _: forks.append(event) if event.startswith("os.fork") else None)
from lowtide import Sandbox
from lowtide.providers.local.doctor import doctor
with Sandbox.run(network="none") as box:
    box.write_file("/tmp/file", b"data").result(60)
    box.exec(["cat", "/tmp/file"], tty=True).result(60)
    namespaces = next(check for check in doctor() if check.name == "user namespaces")
print(forks, namespaces.ok)
"""


def test_a_program_with_sandboxes_is_never_forked_by_lowtide() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "[] True\n", done.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["sh", "-c", 'test "$E2B_API_KEY" && exit 7'], 7, ""),
        (["no-such-command"], 127, "no-such-command: command not found"),
        (["/etc/passwd"], 126, "/etc/passwd: not executable"),
    ],
)
def test_an_emulator_starts_its_command_without_a_warning(command: list[str], code: int, said: str) -> None:
    # From 3.12 on Python warns where a process that has threads runs Python between fork and exec (preexec_fn).
    strict = [sys.executable, "-W", "always:This process:DeprecationWarning"]
    done = subprocess.run(
        [*strict, "-m", "lowtide", "emulate", "e2b", "--plain", "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "multi-threaded" not in done.stderr
