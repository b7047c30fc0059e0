"""The conformance suite and the isolation attempts again, in an interpreter without any privilege."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
UID = 23_117  # nobody's: no passwd entry, no group, no home

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="this run is an ordinary user's already"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


@pytest.fixture
def as_ordinary_user() -> Iterator[list[str]]:
    """The command that runs pytest as an ordinary user, with the packages of this environment."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    probe = [SYSTEM_PYTHON, "-c", "import sys; print(*sys.version_info[:2])"]
    version = subprocess.run(probe, capture_output=True, text=True, check=False).stdout.split()
    if version != [str(part) for part in sys.version_info[:2]]:
        pytest.skip(
            f"{SYSTEM_PYTHON} is not the Python {sys.version_info.major}.{sys.version_info.minor} of this environment"
        )
    packages = [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    if not all(_others_may_pass(Path(path)) for path in packages):
        pytest.skip("an ordinary user cannot read this checkout")
    place = Path(tempfile.mkdtemp(prefix="ltu-", dir="/tmp"))
    os.chown(place, UID, UID)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(place),
        "PYTHONPATH": ":".join(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    yield [
        *("setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "--inh-caps=-all", "--"),
        *("env", "-i", *(f"{name}={value}" for name, value in environment.items())),
        *(
            SYSTEM_PYTHON,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-o",
            "timeout=300",
        ),
    ]
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize(
    "what",
    [
        "tests/conformance/test_local.py",
        "tests/e2e/test_isolation_local.py",
        "tests/e2e/test_isolation_host_local.py",
        "tests/e2e/test_isolation_files_local.py",
        pytest.param("tests/e2e/test_isolation_exhaustion_local.py", marks=pytest.mark.alone),
    ],
)
def test_passes_without_privilege(as_ordinary_user: list[str], what: str) -> None:
    done = subprocess.run(
        [*as_ordinary_user, what], cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def _others_may_pass(path: Path) -> bool:
    return path.exists() and all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))
