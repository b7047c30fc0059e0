"""The program that goes into containers: what is committed is what its source builds."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from lowtide.errors import UnsupportedError
from lowtide.providers.docker import inside
from lowtide.providers.docker.inside import build

COMPILER = "gcc 12"  # of Debian 12: others build the same program with other bytes


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_committed_program_is_built_from_its_source(architecture: str, tmp_path: Path) -> None:
    compiler = build.COMPILERS[architecture]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if version.strip().split(".")[0] != COMPILER.split()[1]:
        pytest.skip(f"{compiler} is not {COMPILER}")
    build.build(architecture, tmp_path / "built")
    built = hashlib.sha256((tmp_path / "built").read_bytes()).hexdigest()
    assert built == hashlib.sha256(inside.program(architecture)).hexdigest()


def test_the_program_is_small_static_and_needs_nothing() -> None:
    data = inside.program("x86_64")
    assert data.startswith(b"\x7fELF")
    assert len(data) < 32_768
    assert b"/lib64/ld-linux" not in data


def test_an_engine_on_another_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="riscv64"):
        inside.program("riscv64")


def test_each_version_of_the_program_has_its_own_volume() -> None:
    assert inside.volume_name("amd64") == inside.volume_name("x86_64")
    assert inside.volume_name("amd64") != inside.volume_name("arm64")
