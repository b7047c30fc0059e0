"""What Daytona does to sandboxes by itself, on a clock that is moved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator

sdk = pytest.importorskip("daytona")
Create = Callable[..., Any]
MINUTE = 60.0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    """An emulator of its own: its clock is moved, and others' sandboxes would feel it."""
    with emulator("daytona", home=tmp_path_factory.mktemp("clock")) as handle:
        yield handle


@pytest.fixture
def create(own: Handle) -> Iterator[Create]:
    found = own.environment
    client = sdk.Daytona(
        sdk.DaytonaConfig(api_key=found["DAYTONA_API_KEY"], api_url=found["DAYTONA_API_URL"])
    )
    made: list[Any] = []

    def make(**kwargs: Any) -> Any:
        made.append(client.create(sdk.CreateSandboxFromSnapshotParams(**kwargs), timeout=0))
        return made[-1]

    yield make
    for box in made:
        with contextlib.suppress(sdk.DaytonaNotFoundError):
            box.delete(timeout=0, wait=True)


def state_of(own: Handle, box: Any) -> str | None:
    """What it really is; None: gone."""
    found = own.state()["sandboxes"]["daytona"]
    return next((one["state"] for one in found if one["sandbox_id"] == box.id), None)


def test_a_sandbox_nobody_uses_is_stopped(own: Handle, create: Create) -> None:
    box = create()  # 15 minutes are the service's own choice
    box.fs.upload_file(b"kept", "file")
    own.clock.advance(14 * MINUTE)
    assert state_of(own, box) == "started"
    box.process.exec("true")
    own.clock.advance(14 * MINUTE)
    assert state_of(own, box) == "started"
    box.refresh_activity()
    own.clock.advance(14 * MINUTE)
    assert state_of(own, box) == "started"
    own.clock.advance(2 * MINUTE)
    assert state_of(own, box) == "stopped"
    box.start(timeout=0)
    assert box.fs.download_file("file") == b"kept"


def test_zero_means_never(own: Handle, create: Create) -> None:
    box = create(auto_stop_interval=0)
    own.clock.advance(30 * 24 * 60 * MINUTE)
    assert state_of(own, box) == "started"


def test_looking_is_not_activity(own: Handle, create: Create) -> None:
    box = create(auto_stop_interval=5)
    own.clock.advance(4 * MINUTE)
    box.refresh_data()
    box.get_preview_link(3000)
    own.clock.advance(2 * MINUTE)
    assert state_of(own, box) == "stopped"


def test_an_idle_sandbox_is_paused_where_that_was_asked_for(own: Handle, create: Create) -> None:
    box = create(auto_pause_interval=5)
    own.clock.advance(6 * MINUTE)
    assert state_of(own, box) == "paused"
    box.start(timeout=0)
    assert box.process.exec("echo back").result == "back\n"


def test_an_ephemeral_sandbox_goes_when_it_stops(own: Handle, create: Create) -> None:
    box = create(ephemeral=True, auto_stop_interval=1)
    own.clock.advance(2 * MINUTE)
    assert state_of(own, box) is None


def test_stopped_archived_and_deleted_one_after_the_other(own: Handle, create: Create) -> None:
    box = create(auto_stop_interval=10, auto_archive_interval=20, auto_delete_interval=60)
    own.clock.advance(11 * MINUTE)
    assert state_of(own, box) == "stopped"
    own.clock.advance(20 * MINUTE)
    assert state_of(own, box) == "archived"
    own.clock.advance(38 * MINUTE)
    assert state_of(own, box) == "archived"
    own.clock.advance(2 * MINUTE)
    assert state_of(own, box) is None


def test_one_leap_over_several_intervals_does_them_all(own: Handle, create: Create) -> None:
    box = create(auto_stop_interval=10, auto_archive_interval=20, auto_delete_interval=60)
    own.clock.advance(71 * MINUTE)
    assert state_of(own, box) is None


def test_the_hard_lifetime_holds_in_every_state_and_can_be_moved(own: Handle, create: Create) -> None:
    running, stopped = create(ttl_minutes=60, auto_stop_interval=0), create(ttl_minutes=60)
    stopped.stop(timeout=0)
    own.clock.advance(30 * MINUTE)
    running.set_ttl(60)
    own.clock.advance(31 * MINUTE)
    assert state_of(own, stopped) is None
    assert state_of(own, running) == "started"
    own.clock.advance(30 * MINUTE)
    assert state_of(own, running) is None


def test_intervals_are_changed_while_it_runs(own: Handle, create: Create) -> None:
    box = create()
    box.set_autostop_interval(60)
    own.clock.advance(30 * MINUTE)
    assert state_of(own, box) == "started"
    box.set_autostop_interval(0)
    box.set_auto_delete_interval(5)
    box.set_ttl(0)
    own.clock.advance(300 * MINUTE)
    assert state_of(own, box) == "started"
    box.stop(timeout=0)
    box.set_auto_delete_interval(-1)
    own.clock.advance(10 * MINUTE)
    assert state_of(own, box) == "stopped"


def test_signed_addresses_expire(own: Handle, create: Create) -> None:
    httpx = pytest.importorskip("httpx")
    box = create(auto_stop_interval=0)
    box.fs.upload_file(b"here", "file")
    ahead = own.clock.now() - time.time()  # the SDK counts from this machine's own time
    url = box.download_url("file", ttl_seconds=int(ahead + 20 * MINUTE))
    with httpx.Client(trust_env=False) as web:
        assert web.get(url).status_code == 200
        own.clock.advance(21 * MINUTE)
        assert web.get(url).status_code == 401
