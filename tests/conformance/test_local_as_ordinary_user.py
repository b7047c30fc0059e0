"""The conformance suite and the isolation attempts again, in an interpreter without any privilege."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.ordinary_user import ROOT, OrdinaryUser, why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

WITHOUT = ("-k", "not a_big_file")  # moved in the same way with privilege, where it is done once


@pytest.fixture
def user() -> Iterator[OrdinaryUser]:
    with OrdinaryUser() as user:
        yield user


@pytest.mark.parametrize(
    "what",
    [
        "tests/conformance/test_local.py",
        "tests/e2e/test_isolation_local.py",
        "tests/e2e/test_isolation_host_local.py",
        "tests/e2e/test_isolation_files_local.py",
        "tests/e2e/test_gvisor_local.py",
        pytest.param("tests/e2e/test_isolation_exhaustion_local.py", marks=pytest.mark.alone),
    ],
)
def test_passes_without_privilege(user: OrdinaryUser, what: str) -> None:
    pytest_here = user.command(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=300", *WITHOUT, what
    )
    done = subprocess.run(pytest_here, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
