"""The state directory and the socket in it: only ours, or refused with what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.errors import LedgerError
from lowtide.lifecycle import guardian_link
from lowtide.lifecycle.guardian_link import GuardianLink, socket_name
from lowtide.machine import home
from lowtide.providers import registry

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
NOBODY = 65534


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    return made


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_is_refused_with_the_fix(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(LedgerError, match="chmod go-w"):
        home({"LOWTIDE_HOME": str(directory)})
    directory.chmod(0o755)
    assert home({"LOWTIDE_HOME": str(directory)}) == directory


@ROOT_ONLY
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    """Also to root, as with sudo: what root leaves there, its user could not use any more."""
    os.chown(directory, NOBODY, NOBODY)
    with pytest.raises(LedgerError, match=r"belongs to user .*set LOWTIDE_HOME"):
        home({"LOWTIDE_HOME": str(directory)})


@ROOT_ONLY
@pytest.mark.parametrize("name", ["ledger.db", "guardian.log"])
def test_leftovers_of_another_user_are_named_with_the_fix_and_nothing_is_launched(
    run_directory: Path, name: str
) -> None:
    directory = run_directory / f"of-nobody-{os.urandom(4).hex()}"
    directory.mkdir(mode=0o700)
    (directory / name).touch(0o600)  # root's
    os.chown(directory, NOBODY, NOBODY)
    program = (
        "import os, sys, pwd\n"
        "from lowtide.errors import LedgerError\n"
        "from lowtide.lifecycle.leases import lifecycle\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for _ in range(3):\n"
        "    try: lifecycle()\n"
        "    except LedgerError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LOWTIDE_HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("sudo chown -R 65534") == 3, done
    assert done.stderr == ""
    assert sorted(path.name for path in directory.iterdir()) == [name]


@ROOT_ONLY
async def test_a_stranger_at_the_socket_is_told_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The credentials of the peer are read before any of ours goes out."""
    monkeypatch.setattr(guardian_link, "launch", lambda path: None)
    program = (
        "import os, socket, sys\n"
        "door = socket.socket(socket.AF_UNIX); door.bind(sys.argv[1]); os.setgid(65534); os.setuid(65534)\n"
        "door.listen(); print('here', flush=True)\n"
        "link, _ = door.accept(); print(len(link.recv(65536)), flush=True)\n"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", program, socket_name()], stdout=subprocess.PIPE, text=True, cwd=directory
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "here\n"
    link = GuardianLink(directory)
    link.wanted(registry.provider("faulty", directory=str(tmp_path / "service")))
    assert stranger.stdout.readline() == "0\n"
    assert "65534" in caplog.text
    stranger.wait()
    stranger.stdout.close()
    link.forget()


def test_connecting_to_one_that_takes_nobody_in_does_not_wait(directory: Path) -> None:
    door = socket.socket(socket.AF_UNIX)
    with guardian_link.DirectoryAddress(directory) as address:
        door.bind(address)
    door.listen(0)
    links = []
    started = time.monotonic()
    while (link := guardian_link.connect(directory)) is not None:
        links.append(link)
        assert len(links) < 100
    assert time.monotonic() - started < 20  # a blocking connect would wait for ever
    for link in links:
        link.close()
    door.close()
