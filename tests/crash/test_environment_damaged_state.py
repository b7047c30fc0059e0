"""The ledger is damaged, its log deleted, or the whole state directory removed, while owners and guardian use it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.conftest import EMULATED
from tests.crash.world import World

LOOK_SECONDS = 5.0
"""How often the guardian reads the ledger for what nobody has told it."""


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def scramble(path: Path) -> None:
    """In place, as a bad disk or a stray program does: the same file, and nothing of it can be read."""
    size = max(path.stat().st_size, 8192)
    with open(path, "r+b") as file:
        file.write(os.urandom(size))
        file.truncate(size)


def damage(world: World, how: str) -> None:
    ledger, log, shared = (world.home / f"ledger.db{rest}" for rest in ("", "-wal", "-shm"))
    if how == "scrambled":
        log.unlink()
        scramble(ledger)
    elif how == "pages scrambled":
        log.unlink()
        with open(ledger, "r+b") as file:  # what opens it still reads the first page
            size = file.seek(0, 2)
            file.seek(4096)
            file.write(os.urandom(max(0, size - 4096)))
    elif how == "emptied":
        log.unlink()
        os.truncate(ledger, 0)
    elif how == "log deleted":
        log.unlink()
    elif how == "shared memory deleted":
        shared.unlink()
    else:
        log.unlink()
        shared.unlink()


HOW = ["scrambled", "pages scrambled", "emptied", "log deleted", "shared memory deleted", "both deleted"]


def seen_by_the_guardian(world: World) -> None:
    world.guardian()
    time.sleep(LOOK_SECONDS + 1.0)


def gone(world: World, made: set[str]) -> Callable[[], bool]:
    """Whether they are, also while the ledger cannot be read."""
    if world.provider_name == "faulty":
        return lambda: not made & set(world.service.sandboxes())
    if world.provider_name in EMULATED:
        return lambda: not asyncio.run(shown(world, made))
    directory = world.home / "local" / "sandboxes"
    return lambda: not any((directory / one).exists() for one in made)


async def shown(world: World, made: set[str]) -> set[str]:
    provider = world.provider()
    try:
        return {info.sandbox_id async for info in provider.list({}) if info.sandbox_id in made}
    finally:
        await provider.aclose()


@pytest.mark.parametrize("how", HOW)
def test_a_dead_owners_sandboxes_are_destroyed(world: World, how: str) -> None:
    owner = world.start("hold", 2)
    owner.until("READY")
    seen_by_the_guardian(world)
    damage(world, how)
    owner.kill()
    until(gone(world, owner.made()), 30)
    until(lambda: not world.open_rows(), 30)


@pytest.mark.only
def test_a_dead_owners_hosted_sandboxes_are_destroyed(world: World) -> None:
    test_a_dead_owners_sandboxes_are_destroyed(world, "scrambled")


@pytest.mark.parametrize("how", HOW)
def test_a_living_owners_leases_are_written_again(world: World, how: str) -> None:
    owner = world.start("hold", 2)
    owner.until("READY")
    seen_by_the_guardian(world)
    ledger_id = world.ledger_id()
    damage(world, how)
    until(lambda: bool(list(world.home.glob("ledger.db.damaged-*"))), 30)
    until(lambda: len(world.open_rows()) == 2, 30)
    assert world.ledger_id() == ledger_id
    assert not gone(world, owner.made())()
    later = world.start("hold", 1)  # and others can use it
    later.until("READY")
    said = doctor(world)
    assert any("damaged" in one["why"] and one["check"] == "ledger kept aside" for one in said), said
    status = run(world, "guardian", "status", "--json")
    assert any("ledger" in note for note in json.loads(status)["notes"]), status
    later.kill()
    owner.kill()
    until(gone(world, owner.made() | later.made()))
    until(lambda: not world.open_rows())


@pytest.mark.also
def test_the_home_is_removed_and_a_dead_owners_sandboxes_are_destroyed(world: World) -> None:
    owner = world.start("hold", 2)
    owner.until("READY")
    seen_by_the_guardian(world)
    guardian = world.guardian()
    shutil.rmtree(world.home, ignore_errors=True)  # what a sandbox has mounted stays
    owner.kill()
    until(lambda: not os.path.exists(f"/proc/{guardian}"), 60)
    assert gone(world, owner.made())()
    if world.provider_name != "local":
        assert not world.open_rows()


@pytest.mark.faulty  # a local sandbox has its files in the home, and ends with them
def test_the_home_is_removed_under_a_living_owner(world: World) -> None:
    owner = world.start("hold", 2)
    owner.until("READY")
    seen_by_the_guardian(world)
    shutil.rmtree(world.home, ignore_errors=True)
    until(lambda: len(world.open_rows()) == 2, 30)
    assert world.home.stat().st_mode & 0o777 == 0o700
    later = world.start("hold", 1)
    later.until("READY")
    assert owner.made() <= world.existing()
    world.guardian()
    later.kill()
    owner.kill()
    world.wait_until_clean()


@pytest.mark.faulty
def test_a_temporary_home_that_its_program_deletes_is_not_made_again(world: World) -> None:
    actor = world.start_program(
        """
        import shutil
        boxes = make(1)
        say("READY")
        sys.stdin.readline()
        results([box.stop() for box in boxes])
        shutil.rmtree(os.environ["LOWTIDE_HOME"])
        """
    )
    actor.until("READY")
    seen_by_the_guardian(world)
    guardian = world.guardian()
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()
    assert actor.wait() == 0
    until(lambda: not os.path.exists(f"/proc/{guardian}"), 60)
    assert not (world.home / "ledger.db").exists()


def run(world: World, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments],
        env=world.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout


def doctor(world: World) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(run(world, "doctor", "--provider", "local", "--json"))
    return found


@pytest.mark.faulty
def test_a_home_that_is_out_of_reach_for_a_while_keeps_its_guardian(world: World) -> None:
    living, dying = world.start("hold", 1), world.start("hold", 1)
    living.until("READY")
    dying.until("READY")
    guardian = world.guardian()
    away = world.home.with_name("away")
    world.home.rename(away)
    world.home.write_text("")  # whoever looks for a file in there gets an error that is not "no such file"
    try:
        dying.kill()
        time.sleep(LOOK_SECONDS + 1.0)
    finally:
        world.home.unlink()
        away.rename(world.home)
    assert world.guardian() == guardian
    until(gone(world, dying.made()), 15)
    assert living.made() <= world.existing()
    living.kill()
    world.wait_until_clean()
