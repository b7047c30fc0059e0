"""Every process that lowtide starts beside the program: nothing in its surroundings gets into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.lifecycle.guardian_link import connect
from lowtide.lifecycle.guardian_link import launch as launch_guardian

HELPERS = [
    "lowtide.lifecycle.guardian_process",
    "lowtide.lifecycle.guardian_workers",
    "lowtide.emulators.__main__",
    "lowtide.emulators.reaper",
    "lowtide.emulators.state",
    "lowtide.cli.tour_worker",
    "lowtide.testing.faulty",
    "lowtide.providers.local",
    "lowtide.providers.local.provider",
    "lowtide.providers.e2b.provider",
]
NEVER = {"builtins", "sys", "_frozen_importlib", "_imp", "__main__"}


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The names of everything that any helper imports, by running their imports, and all of Python's own."""
    program = (
        "import importlib, json, sys\n"
        f"for name in {HELPERS!r}: importlib.import_module(name)\n"
        "for name in ('e2b', 'daytona', 'aiohttp', 'trustme'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError: pass\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, timeout=120)
    names = set(json.loads(done.stdout)) | set(sys.stdlib_module_names)
    return {name for name in names if name.isidentifier()} - NEVER | {"sitecustomize", "usercustomize"}


@pytest.fixture
def hostile(imported: set[str], tmp_path: Path) -> Path:
    """A directory with a module of each of these names, each of which leaves a mark when it is imported."""
    directory = tmp_path / "hostile"
    directory.mkdir()
    for name in imported:
        (directory / f"{name}.py").write_text(
            f"import os\nos.close(os.open({str(tmp_path / 'struck')!r} + '-{name}', os.O_CREAT, 0o600))\n"
            "raise ImportError('planted')\n"
        )
    return directory


def struck(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.parent.glob("struck-*"))


def run_there(hostile: Path, program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A program that is not hit itself (``-P``), in that directory, with it in what its children inherit."""
    inherited = (
        f"import os\nos.environ.update(PYTHONPATH={str(hostile)!r}, "
        f"PYTHONSTARTUP={str(hostile / 'json.py')!r}, PYTHONHOME='')\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", inherited + program],
        cwd=hostile,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )


FAULTY = """
import os, sys
from lowtide import Sandbox
from lowtide.testing import FaultyService
from lowtide.lifecycle.guardian_link import connect
from lowtide.lifecycle.leases import lifecycle
import time
with FaultyService(os.environ["LOWTIDE_HOME"] + "-service") as service:
    with Sandbox.run(provider="faulty") as box:
        deadline = time.monotonic() + 60
        while connect(lifecycle().path) is None:
            assert time.monotonic() < deadline, "no guardian"
            time.sleep(0.05)
"""
LOCAL = """
from lowtide import Sandbox
with Sandbox.run(provider="local") as box:
    assert box.exec(["echo", "here"]).result().stdout.strip() == "here"
"""
WORKER = """
import json, socket, subprocess
from lowtide import isolated
from lowtide.lifecycle.guardian_link import DirectoryAddress
from lowtide.machine import home
door = socket.socket(socket.AF_UNIX)
with DirectoryAddress(home()) as address: door.bind(address)
door.listen()
door.settimeout(120)
command = isolated.command("lowtide.lifecycle.guardian_workers", str(home()), "e2b", "nobody")
worker = subprocess.Popen(command)
link, _ = door.accept()
link.settimeout(120)
lines = link.makefile("rb")
assert "worker" in json.loads(lines.readline())
assert "refused" in json.loads(lines.readline())  # once everything is loaded
link.sendall(b'{"renew": "none", "number": 1}\\n')
assert json.loads(lines.readline())["number"] == 1
link.sendall(b'{"leave": true}\\n')
assert worker.wait(120) == 0
"""
EMULATOR = """
from lowtide import emulators
with emulators.start("e2b", timeout_seconds=120) as running:
    assert running.environment
"""
TOUR = """
import os, subprocess
from lowtide import isolated
from lowtide.testing import FaultyService
with FaultyService(os.environ["LOWTIDE_HOME"] + "-service") as service:
    command = isolated.command("lowtide.cli.tour_worker", "faulty", "tag", "7", "1")
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    line = worker.stdout.readline()
    worker.terminate()
    worker.wait()
    assert line.startswith(b"["), line
    service.wait_until_empty(seconds=60)
"""


@pytest.mark.parametrize(
    "program",
    [FAULTY, LOCAL, WORKER, EMULATOR, TOUR],
    ids=["guardian", "spawner", "worker", "emulator and reaper", "tour worker"],
)
def test_no_module_in_the_working_directory_gets_into_a_helper(hostile: Path, program: str) -> None:
    done = run_there(hostile, program, LOWTIDE_HOME=str(private(hostile.parent)))
    assert done.returncode == 0, done.stderr
    assert struck(hostile) == []
    assert "guardian" not in done.stderr


def private(directory: Path) -> Path:
    home = directory / "home"
    home.mkdir(mode=0o700)
    return home


def test_lowtide_and_its_dependencies_in_an_archive_or_a_target_directory(tmp_path: Path) -> None:
    """`pip install --target`, zipapp and the like: on the path of the program, unknown to the bare interpreter."""
    import shutil

    import lowtide

    target = tmp_path / "target"
    shutil.copytree(Path(lowtide.__file__).parent, target / "lowtide")
    (target / "dependency.py").write_text("here = True\n")
    (target / "lowtide" / "probe.py").write_text(
        "import dependency, json, sys, lowtide\n"
        "def main(said): print(json.dumps([said, lowtide.__file__, json.__file__, sys.flags.isolated]))\n"
    )
    (target / "json.py").write_text("raise ImportError('planted')\n")
    program = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(target)!r})\n"
        "import subprocess; from lowtide import isolated\n"
        "print(subprocess.run(isolated.command('lowtide.probe', 'hello'), capture_output=True, check=True).stdout.decode())"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said, ours, theirs, flag = json.loads(done.stdout)
    assert (said, ours, flag) == ("hello", str(target / "lowtide" / "__init__.py"), 1)
    assert not theirs.startswith(str(target))


HOLD_A_MOMENT = """
import os, sys, time
{before}
from lowtide import Sandbox
from lowtide.lifecycle import guardian_link
from lowtide.testing import FaultyService
with FaultyService(os.environ["LOWTIDE_HOME"] + "-service") as service:
    with Sandbox.run(provider="faulty"), Sandbox.run(provider="faulty"):
        time.sleep({seconds})
print("done")
"""


def test_a_guardian_that_does_not_come_up_is_one_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLD_A_MOMENT.format(before="", seconds=3)],
        env={**os.environ, "LOWTIDE_HOME": str(private(tmp_path)), "LOWTIDE_PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "done\n", done.stderr
    lines = done.stderr.splitlines()
    assert len([line for line in lines if "could not be started" in line]) == 1, lines
    assert len(lines) <= 2, lines


@pytest.mark.parametrize("mark", ["sys.frozen = True", "pass"])
def test_a_frozen_application_is_not_started_again(tmp_path: Path, mark: str) -> None:
    """PyInstaller, Nuitka, an embedding program: `sys.executable` is the application itself."""
    application = tmp_path / "application"
    application.write_text(f"#!/bin/sh\ntouch {tmp_path}/started-again\n")
    application.chmod(0o755)
    before = f"{mark}; sys.executable = {str(application)!r}; sys.prefix = sys.exec_prefix = sys.base_prefix = '/nowhere'"
    environ = {**os.environ, "LOWTIDE_HOME": str(private(tmp_path))}
    environ.pop("LOWTIDE_PYTHON", None)
    program = HOLD_A_MOMENT.format(before=before, seconds=1)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "done\n", done.stderr
    assert not (tmp_path / "started-again").exists()
    (line,) = done.stderr.splitlines()
    assert "LOWTIDE_PYTHON" in line
    environ["LOWTIDE_PYTHON"] = sys.executable
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert "watches" in (tmp_path / "home" / "guardian.log").read_text()


def test_what_keeps_a_guardian_from_starting_is_in_its_log(tmp_path: Path) -> None:
    home = private(tmp_path)
    (home / "ledger.db").write_text("this is no database at all, and it is long enough to be read as one")
    os.waitpid(launch_guardian(home), 0)
    deadline = time.monotonic() + 60
    while "not a database" not in (home / "guardian.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (home / "guardian.log").stat().st_mode & 0o777 == 0o600
    assert connect(home) is None
