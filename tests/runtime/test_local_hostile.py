"""A runtime whose sandbox turns against its action server, and calls that fail on the way."""

from __future__ import annotations

import glob
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.actionserver.serve import PORT
from lowtide.errors import SandboxError, SandboxFileNotFoundError, SandboxUnavailableError, ValidationError
from lowtide.runtime import LocalRuntime

SECONDS = 120.0
KILL = "for p in /proc/[0-9]*; do grep -q actionserver $p/cmdline && kill -9 ${p#/proc/}; done 2>/dev/null"


@pytest.fixture(scope="module")
def runtime() -> Iterator[LocalRuntime]:
    with LocalRuntime() as made:
        yield made


def test_a_server_that_was_killed_from_inside_is_started_again(runtime: LocalRuntime, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match="may have happened"):
        runtime.run_command(f"echo x >>/tmp/times; rm -f /tmp/*.pyz; {KILL}").result(SECONDS)
    seen = runtime.run_command("cat /tmp/times").result(SECONDS)
    assert (seen.exit_code, seen.content) == (0, "x\n")
    assert "started again" in seen.metadata.prefix
    assert "started again" not in runtime.run_command("true").result(SECONDS).metadata.prefix
    with pytest.raises(SandboxUnavailableError):
        runtime.run_command(KILL).result(SECONDS)
    (tmp_path / "f").write_text("x")
    assert runtime.upload(tmp_path / "f", "/tmp/up").result(SECONDS).success


SQUAT = f"""
import glob, os, socket
for path in glob.glob("/proc/[0-9]*/cmdline"):
    if b"actionserver" in open(path, "rb").read():
        os.kill(int(path.split("/")[2]), 9)
while True:
    try:
        squatted = socket.create_server(("127.0.0.1", {PORT}))
        break
    except OSError:
        pass
while True:
    connection, _ = squatted.accept()
    connection.sendall(b"nonsense\\r\\n\\r\\n")
    connection.close()
"""


def test_a_port_that_was_taken_from_a_killed_server_is_an_error_each_time() -> None:
    with LocalRuntime() as runtime:
        runtime.write("/tmp/squat.py", SQUAT).result(SECONDS)
        with pytest.raises(SandboxError):
            runtime.run_command("setsid --wait python3 /tmp/squat.py").result(SECONDS)
        for _ in range(3):
            with pytest.raises(SandboxError):
                runtime.run_command("true").result(SECONDS)


def test_a_download_that_fails_leaves_no_directory(runtime: LocalRuntime) -> None:
    there = f"{tempfile.gettempdir()}/lowtide-download-*"
    before = set(glob.glob(there))
    with pytest.raises(SandboxFileNotFoundError):
        runtime.download("/nope").result(SECONDS)
    assert set(glob.glob(there)) <= before


def test_why_a_large_upload_is_refused_is_said(runtime: LocalRuntime, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(ValidationError, match="absolute"):
        runtime.upload(tmp_path / "large", "relative").result(SECONDS)
    with pytest.raises(SandboxError, match="exists"):
        runtime.upload(tmp_path / "large", "/etc/hostname").result(SECONDS)


def test_a_switch_that_means_nothing_here_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lowtide.runtime"):
        LocalRuntime(rm_all_containers=False)
        assert "rm_all_containers" in caplog.text
        caplog.clear()
        LocalRuntime()
        assert not caplog.text
