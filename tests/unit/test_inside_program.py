"""The program inside: what is committed is what its source builds."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lowtide.errors import UnsupportedError
from lowtide.providers.inside import build
from lowtide.providers.inside import program as inside

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
    assert len(data) < 40_960
    assert len(inside.packed("x86_64")) < 131_072 // 4
    assert b"/lib64/ld-linux" not in data


def test_another_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="riscv64"):
        inside.program("riscv64")


def test_each_version_of_the_program_has_its_own_name() -> None:
    assert inside.fingerprint("amd64") == inside.fingerprint("x86_64")
    assert inside.fingerprint("amd64") != inside.fingerprint("arm64")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")
@pytest.mark.parametrize(("verb", "has"), [("init", True), ("guard", False)])
def test_guarded_commands_lack_the_capability_that_shields_the_channel(verb: str, has: bool) -> None:
    """Who may do less than a process may not look into it, whatever the files let him read."""
    program = str(Path(inside.__file__).parent / f"inside.{os.uname().machine}")
    said = subprocess.run(
        ["unshare", "--pid", "--fork", program, verb, "0", "0", "cat", "/proc/self/status"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sets = dict(line.split(":\t") for line in said.splitlines() if line.startswith("Cap"))
    own = Path("/proc/self/status").read_text()
    if (
        not int(dict(line.split(":\t") for line in own.splitlines() if line.startswith("Cap"))["CapPrm"], 16)
        >> 8
        & 1
    ):
        pytest.skip("this machine's root has no CAP_SETPCAP itself")
    assert {name: bool(int(value, 16) >> 8 & 1) for name, value in sets.items()} == {
        "CapInh": False,
        "CapPrm": has,
        "CapEff": has,
        "CapBnd": has,
        "CapAmb": False,
    }
