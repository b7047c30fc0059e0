"""The guardian came from another installation or network than its owners, or its own was deleted under it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lowtide
from tests.crash.conftest import EMULATED
from tests.crash.environments import Place
from tests.crash.world import Actor, World

NEEDED = {
    "faulty": "testing/faulty.py",
    "local": "providers/local/provider.py",
}
"""Without this module an installation cannot serve the provider, as one without its SDK cannot serve a hosted one."""


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def installation(world: World, name: str) -> Path:
    """Another copy of lowtide, for programs that are started with ``PYTHONPATH`` set to it."""
    target = world.home.parent / name
    shutil.copytree(
        Path(lowtide.__file__).parent, target / "lowtide", ignore=shutil.ignore_patterns("__pycache__")
    )
    return target


def without_packages(name: str) -> Place:
    """A place in which a program runs on the plain interpreter, without the packages installed here, and so without SDKs.

    A module beside lowtide would not do: lowtide's own processes load nothing from there before what is installed.
    """
    plain = os.path.join(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    if (
        subprocess.run([plain, "-c", f"import {EMULATED[name]}"], capture_output=True, check=False).returncode
        == 0
    ):
        pytest.skip(f"the plain interpreter has the {name} SDK, too")
    return ("sh", "-c", f'shift; exec {plain} "$@"', "sh")


def first_come(world: World, target: Path, *within: str) -> Actor:
    """An owner from that installation, with a sandbox of the other provider, whose guardian is everybody's."""
    other = "local" if world.provider_name == "faulty" else "faulty"
    actor = world.start_program(
        f"OPTIONS['provider'] = {other!r}\nmake(1)\nwait_to_be_struck()",
        PYTHONPATH=str(target),
        within=within,
    )
    actor.until("READY")
    guardian = world.guardian()
    arguments = Path(f"/proc/{guardian}/cmdline").read_bytes()
    assert str(target).encode() in arguments, "the guardian is not from there"
    return actor


@pytest.mark.also
def test_the_guardian_comes_from_an_installation_that_cannot_serve_the_provider(world: World) -> None:
    target = installation(world, "without")
    place: Place = ()
    if world.provider_name in EMULATED:
        place = without_packages(world.provider_name)
    else:
        (target / "lowtide" / NEEDED[world.provider_name]).unlink()
    other = first_come(world, target, *place)
    owner = world.start("hold", 2)
    owner.until("READY")
    owner.kill()
    ours = owner.made()
    bound = time.monotonic() + world.bound + 20
    while ours & world.existing():
        assert time.monotonic() < bound, f"leaked after: {world.log()[-3000:]}"
        time.sleep(0.05)
    other.kill()
    world.wait_until_clean()


@pytest.mark.also
def test_the_installation_of_owner_and_guardian_is_deleted(world: World) -> None:
    """tox, uvx, a CI job: the environment is removed while, or before, the process is killed."""
    target = installation(world, "deleted")
    owner = world.start("hold", 2, PYTHONPATH=str(target))
    owner.until("READY")
    until_ready_for(world)
    shutil.rmtree(target)
    owner.kill()
    world.wait_until_clean()


@pytest.mark.also("e2b")
def test_a_guardian_whose_installation_was_deleted_makes_way(world: World) -> None:
    target = installation(world, "deleted")
    first = world.start("hold", 1, PYTHONPATH=str(target))
    first.until("READY")
    guardian = world.guardian()
    until_ready_for(world)
    shutil.rmtree(target)
    later = world.start("hold", 2)
    later.until("READY")
    until(lambda: world.guardian() != guardian)
    until(lambda: not os.path.exists(f"/proc/{guardian}"))
    assert first.made() | later.made() <= world.existing()
    later.kill()
    first.kill()
    world.wait_until_clean()


@pytest.mark.only("e2b")
def test_a_guardian_that_can_serve_nothing_of_what_is_left_leaves(world: World) -> None:
    target = installation(world, "deleted")
    owner = world.start("hold", 1, PYTHONPATH=str(target))
    owner.until("READY")
    guardian = world.guardian()
    until_ready_for(world)
    shutil.rmtree(target)
    workers = workers_of(world)
    assert workers
    owner.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{guardian}"), 90)
    other = world.start("normal_exit", 1)  # the guardian of the next process goes on
    assert other.wait() == 0
    world.wait_until_clean()


def until_ready_for(world: World) -> None:
    """Until the guardian has what it needs, its workers among it: a moment after the owner has come."""
    if world.provider_name in EMULATED:
        until(lambda: bool(workers_of(world)))
    time.sleep(2.5)


def workers_of(world: World) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
                if b"lowtide.lifecycle.guardian_workers" in words and os.fsencode(world.home) in words:
                    found.append(int(name))
    return found


@pytest.mark.only
@pytest.mark.skipif(os.getuid() != 0, reason="makes a network namespace as root")
def test_the_guardian_was_started_in_another_network_namespace(world: World) -> None:
    """A VPN, `unshare -n`: the guardian cannot reach the service, its owner's worker can."""
    other = world.start_program(
        "OPTIONS['provider'] = 'faulty'\nmake(1)\nwait_to_be_struck()", within=("unshare", "--net")
    )
    other.until("READY")
    guardian = world.guardian()
    assert os.stat(f"/proc/{guardian}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    owner = world.start("hold", 2)
    owner.until("READY")
    owner.kill()
    bound = time.monotonic() + world.bound + 20
    while owner.made() & world.existing():
        assert time.monotonic() < bound, f"leaked after: {world.log()[-3000:]}"
        time.sleep(0.05)
    other.kill()
    world.wait_until_clean()


@pytest.mark.skipif(os.getuid() != 0, reason="makes a network namespace as root")
def test_owners_in_two_network_namespaces_share_a_guardian(world: World) -> None:
    inside = world.start("hold", 1, within=("unshare", "--net"))
    inside.until("READY")
    outside = world.start("hold", 1)
    outside.until("READY")
    inside.kill()
    outside.kill()
    world.wait_until_clean()


def python_that_cannot(world: World, module: str, instead: str) -> str:
    """A Python for lowtide's own processes in which one of them does not come up."""
    path = world.home.parent / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in *{module}*) {instead};; esac\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.only("e2b")
def test_an_owner_is_warned_when_no_worker_can_be_started_for_it(world: World) -> None:
    """While it lives: after its death nobody could tell anybody."""
    broken = python_that_cannot(world, "guardian_workers", "exit 1")
    owner = world.start("hold", 1, LOWTIDE_PYTHON=broken)
    owner.until("READY")
    until(lambda: "could not be started (exit status 1)" in owner.errors.read_text(), 15)
    owner.process.terminate()
    owner.wait()
    world.wait_until_clean()


@pytest.mark.parametrize("instead", ["exit 0", "exec sleep 20"])
def test_an_owner_is_warned_when_its_guardian_does_not_come_up(world: World, instead: str) -> None:
    broken = python_that_cannot(world, "guardian_process", instead)
    owner = world.start("hold", 1, LOWTIDE_PYTHON=broken)
    owner.until("READY")
    until(lambda: "the guardian did not come up within 5 s" in owner.errors.read_text(), 5.0 * 3)
    owner.process.terminate()
    owner.wait()
    world.wait_until_clean()


@pytest.mark.parametrize(
    ("variable", "value", "where"),
    [
        ("XDG_STATE_HOME", "state", ".local/state/lowtide"),  # ignored, as its specification asks
        ("XDG_STATE_HOME", "~/tilde", "tilde/lowtide"),
        ("LOWTIDE_HOME", "~/named", "named"),
        ("LOWTIDE_HOME", "relative", "relative"),
    ],
)
def test_a_relative_home_or_one_with_a_tilde_has_its_guardian(
    world: World, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, where: str
) -> None:
    home = world.home.parent
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    del world.environ["LOWTIDE_HOME"]
    world.environ |= {variable: value, "HOME": str(home)}
    world.home = home / where
    world.home.parent.mkdir(parents=True, exist_ok=True)
    actor = world.start("hold", 1)
    actor.until("READY")
    world.guardian()
    said = actor.errors.read_text()
    assert ("XDG_STATE_HOME=state is not an absolute path and is ignored" in said) == (value == "state"), said
    assert sorted(path.name for path in home.iterdir() if path.name in ("state", "~")) == []
    actor.kill()
    world.wait_until_clean()


@pytest.mark.only
def test_a_relative_home_has_its_guardian_and_its_workers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.home.parent)
    world.environ["LOWTIDE_HOME"] = world.home.name
    actor = world.start("hold", 1)
    actor.until("READY")
    world.guardian()
    actor.kill()
    world.wait_until_clean()
