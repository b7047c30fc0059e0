"""A sandbox is kept or released while a renewal of its short lifetime is on its way: the keep has the last word."""

from __future__ import annotations

import json
import time

import pytest

from tests.crash.world import Actor, World


def go_on(actor: Actor) -> None:
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()


def seconds_left(world: World, sandbox_id: str) -> float:
    records = [json.loads(path.read_text()) for path in (world.service.directory / "sandboxes").iterdir()]
    (expires,) = (record["expires"] for record in records if record["id"] == sandbox_id)
    return float(expires) - time.time()


@pytest.mark.faulty  # can hold a renewal
@pytest.mark.parametrize("how", ["kept", "released"])
def test_its_lifetime_is_the_keeps_whatever_the_provider_hears_last(world: World, how: str) -> None:
    actor = world.start_program(
        f"""
        session = Session(provider=PROVIDER, keep={"always" if how == "kept" else "never"!r})
        box = session.sandbox()
        box.start().result()
        say("MADE", box.sandbox_id)
        sys.stdin.readline()
        session.close().result() if {how == "kept"} else session.release(box)
        say("DONE")
        sys.stdin.readline()
        """,
        LOWTIDE_LEASE_SECONDS="9",
    )
    sandbox_id = actor.until("MADE").split()[1]
    world.service.fault("renew", hold_seconds=2.0)
    deadline = time.monotonic() + 20
    while world.service.pending():  # the guardian asks, and is not heard yet
        assert time.monotonic() < deadline, "nobody has renewed it"
        time.sleep(0.02)
    go_on(actor)
    actor.until("DONE")
    assert seconds_left(world, sandbox_id) > 3600
    time.sleep(4.0)  # now it is
    left = seconds_left(world, sandbox_id)
    assert left > 3600, f"it was to live for a day, and has {left:.0f} s left"
    go_on(actor)
    assert actor.wait() == 0
    world.service.clear()
    delete = world.start_program(f"Sandbox.delete({sandbox_id!r}, provider=PROVIDER).result()")
    assert delete.wait() == 0
    world.wait_until_clean()
