"""A create whose answer was lost is ended by taking its request's key (CoreWeave): whoever does that is killed, too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coreweave_emulator import needs_emulator
from tests.crash.world import World

pytestmark = needs_emulator

_SECONDS = 4.0
"""What the service takes to make it."""


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    from lowtide.testing import emulator

    with emulator("coreweave", plain=True) as handle:
        yield handle


@pytest.mark.parametrize("step", ["recover:replay", "recover:replayed"])
def test_guardian_killed_while_it_takes_the_key_of_a_request_under_way(
    service: Any, tmp_path: Path, step: str
) -> None:
    world = World(tmp_path, "coreweave", service.environment)
    world.environ["LOWTIDE_GUARDIAN_CRASH_AT"] = f"{step}@{world.home}/struck"
    # Whoever only waited to see what appears would not see it.
    world.environ["LOWTIDE_CREATE_WINDOW_SECONDS"] = "0.5"
    peer = world.start_peer()
    slow = service.faults.add("create-slow", seconds=_SECONDS)
    owner = world.start("hold", 1)
    while not service.faults.hits(slow):
        assert owner.process.poll() is None
        time.sleep(0.02)
    sent = time.monotonic()
    owner.kill()
    world.until_struck()
    world.kill_guardian()  # with the worker that was at this step; the neighbour starts the next one
    world.wait_until_clean()
    time.sleep(max(0.0, sent + _SECONDS + 0.5 - time.monotonic()))  # what was asked for would be made by now
    assert world.existing() <= world.spared
    world.end_peer(peer)
    world.wait_until_clean()
    world.close()
    assert service.state()["sandboxes"]["coreweave"] == []
