"""Process 1 of a local sandbox: what is committed is what its source builds, and nothing can look into it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.errors import SandboxFailedError
from lowtide.providers.local import LocalProvider, first
from lowtide.providers.local.first import build

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, spec

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
    committed = first.program(architecture)
    assert committed is not None
    assert (
        hashlib.sha256((tmp_path / "built").read_bytes()).hexdigest() == hashlib.sha256(committed).hexdigest()
    )


def test_another_architecture_has_no_program() -> None:
    assert first.program("riscv64") is None


async def test_what_is_left_to_process_one_is_reaped(provider: LocalProvider) -> None:
    made = await provider.create(spec())
    await run(provider, made.sandbox_id, "sh", "-c", "for n in 1 2 3 4; do (sleep 0.05 &) ; done")
    script = "sleep 0.5; grep -l '^State:.Z' /proc/[0-9]*/status"
    assert (await run(provider, made.sandbox_id, "sh", "-c", script))[1] == ""


async def test_a_main_commands_orphans_are_reaped_too(provider: LocalProvider) -> None:
    made = await provider.create(spec(command=("sh", "-c", "(sleep 0.05 &); exec sleep 1000")))
    script = "sleep 0.5; grep -l '^State:.Z' /proc/[0-9]*/status"
    assert (await run(provider, made.sandbox_id, "sh", "-c", script))[1] == ""


async def test_the_working_directory_is_made_inside(provider: LocalProvider, tmp_path: Path) -> None:
    folder = f"{tmp_path}/deep/er"
    made = await provider.create(spec(working_dir=folder))
    assert (await run(provider, made.sandbox_id, "pwd"))[1] == folder + "\n"
    assert not os.path.exists(f"{tmp_path}/deep")


async def test_a_working_directory_that_cannot_be_is_said(provider: LocalProvider) -> None:
    with pytest.raises(SandboxFailedError, match="working directory"):
        await provider.create(spec(working_dir="/etc/passwd/x"))


async def test_whoever_attaches_later_has_the_same_environment(
    provider: LocalProvider, tmp_path: Path
) -> None:
    wanted = {"LD_PRELOAD": "/no/such.so", "A": "1=2", "EMPTY": ""}
    made = await provider.create(spec(environment=wanted))
    other = LocalProvider.connect({"LOWTIDE_HOME": str(provider.home.parent)})
    try:
        _, out, _ = await run(other, made.sandbox_id, "env")
    finally:
        await other.aclose()
    lines = out.splitlines()
    assert {f"{name}={value}" for name, value in wanted.items()} <= set(lines)
    assert not [line for line in lines if line.startswith("+")]
