"""Local sandboxes for programs that are started with a narrow umask or narrow limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, resource, sys
{first}
from lowtide import Sandbox
boxes = [Sandbox.run(network="{network}") for _ in range(3)]  # the last one moves into what was made ahead
print({{box.exec(["stat", "-c", "%a", "/", "/etc", "/etc/passwd", "/etc/resolv.conf"]).result().stdout for box in boxes}})
kept = boxes[0].snapshot().result()
print(Sandbox.run(snapshot=kept).exec(["sh", "-c", "cat /etc/hostname; python3 -c 'print(1)'"]).result().stdout)
"""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("os.umask(0o077)", id="umask"),
        pytest.param("resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))", id="descriptors"),
        pytest.param("resource.setrlimit(resource.RLIMIT_NPROC, (500, 500))", id="processes"),
        pytest.param("resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", id="no cores"),
    ],
)
@pytest.mark.parametrize("network", ["host", "internet"])
def test_it_is_the_same_sandbox(tmp_path: Path, first: str, network: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first, network=network)],
        env={**os.environ, "LOWTIDE_HOME": str(tmp_path / "home"), "LOWTIDE_PROVIDER": "local"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "{'755\\n755\\n644\\n644\\n'}\nsandbox\n1\n\n", done.stderr[-3000:]


def test_more_commands_than_there_are_descriptors_for_are_an_error_of_ours(tmp_path: Path) -> None:
    program = """
import resource
from lowtide import Sandbox
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
with Sandbox.run() as box:
    box.exec(["true"]).result()
    commands = [box.exec(["sleep", "1"]) for _ in range(40)]
    errors = {type(one.exception()).__name__ for one in commands}
    print(errors, box.exec(["echo", "on"]).result().stdout)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LOWTIDE_HOME": str(tmp_path / "home"), "LOWTIDE_PROVIDER": "local"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout.replace("'SandboxUnavailableError'", "'ResourceExhaustedError'")  # not a pidfd, even
    assert "'ResourceExhaustedError'" in said, done.stderr[-3000:]
    assert "'OSError'" not in said
    assert said.endswith("on\n\n")
