"""The suite's own leak check finds what it is there to find, and nothing of anybody else."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.providers.local import bound_groups
from lowtide.providers.local.bound import Bound
from lowtide.testing.leaks import Watch
from lowtide.trees.remove import remove_at


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="watched-") as path:
        yield Path(path)


@pytest.mark.parametrize("trace", ["command line", "environment", "working directory", "open files"])
def test_a_process_of_the_run_is_found_by_any_trace(run: Path, trace: str) -> None:
    command, environment, cwd, stdin = ["sleep", "100"], {}, "/", None
    if trace == "command line":
        command = ["sh", "-c", "sleep 100; true", str(run)]
    elif trace == "environment":
        environment = {"LOWTIDE_HOME": str(run)}
    elif trace == "working directory":
        cwd = str(run)
    else:
        (run / "file").touch()
        stdin = (run / "file").open()
    process = subprocess.Popen(command, env=environment, cwd=cwd, stdin=stdin, start_new_session=True)
    try:
        if stdin is not None:
            stdin.close()
        found = [leak for leak in Watch(run).left() if leak.kind == "process"]
        assert [str(process.pid) in leak.what for leak in found] == [True]
        assert trace in found[0].what
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert Watch(run).left() == []


def test_a_sandbox_directory_and_a_temporary_file_are_found(run: Path) -> None:
    (run / "main" / "local" / "sandboxes" / "01m7gc7v6knm70gcayr5jesby5").mkdir(parents=True)
    (run / "tmp" / "pytest-of-root").mkdir(parents=True)
    (run / "tmp" / "forgotten").touch()
    assert sorted(Path(leak.what).name for leak in Watch(run).left()) == [
        "01m7gc7v6knm70gcayr5jesby5",
        "forgotten",
    ]


def test_a_group_around_all_sandboxes_is_found(run: Path) -> None:
    home = run / "main" / "local"
    (home / "sandboxes").mkdir(parents=True)
    groups = bound_groups.shared(Bound.resolve({}, home.parent), home)
    if not groups:
        pytest.skip("no control groups can be made here")
    watch = Watch(run)
    try:
        for group in groups:
            group.path.mkdir()
        found = {leak.what for leak in watch.left()}  # and nobody who merely looks at it, as kubelet does
        assert found == {str(group.path) for group in groups}
    finally:
        bound_groups.release([str(group.path) for group in groups])
    assert watch.left() == []


def test_a_tree_deeper_than_the_stack_stops_nobody(run: Path) -> None:
    here = os.open(run, os.O_RDONLY)
    top = os.open(run, os.O_RDONLY)
    try:
        for _ in range(3000):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        assert Watch(run).left() == []
    finally:
        os.close(here)
        remove_at(top, "d")
        os.close(top)


def test_a_living_sandbox_is_found_with_its_processes() -> None:
    from lowtide import Sandbox

    with Sandbox.run(provider="local"):
        home = Path(os.environ["LOWTIDE_HOME"])
        kinds = {leak.kind for leak in Watch(home).left()}
    assert {"process", "file"} <= kinds


def test_other_processes_of_this_machine_are_left_alone(run: Path) -> None:
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        assert Watch(run).left() == []
    finally:
        bystander.kill()
        bystander.wait()
