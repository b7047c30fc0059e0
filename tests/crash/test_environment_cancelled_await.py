"""Whoever is cancelled while waiting for a sandbox leaves none behind, in a process that lives on."""

from __future__ import annotations

import time

import pytest

from tests.crash.world import Actor, World

PROGRAM = """
    async def a_task(work):
        return await work

    async def main():
        BODY
        say("CANCELLED")
        await asyncio.to_thread(sys.stdin.readline)

    asyncio.run(main())
"""
WAITS = {
    "wait-for": """
        try:
            await asyncio.wait_for(Sandbox.run(**OPTIONS), 0.7)
        except TimeoutError:
            pass""",
    "task": """
        task = asyncio.create_task(a_task(Sandbox.run(**OPTIONS)))
        await asyncio.sleep(0.7)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()""",
    "start": """
        try:
            await asyncio.wait_for(Sandbox(**OPTIONS).start(), 0.7)
        except TimeoutError:
            pass""",
    "block": """
        try:
            async with asyncio.timeout(0.7), Sandbox.run(**OPTIONS):
                await asyncio.sleep(60)
        except TimeoutError:
            pass""",
    "cancelled operation": """
        starting = Sandbox(**OPTIONS).start()
        await asyncio.sleep(0.3)
        starting.cancel()""",
    "of a session": """
        session = Session(provider=PROVIDER, tags=["crash"])
        try:
            await asyncio.wait_for(session.sandbox().start(), 0.7)
        except TimeoutError:
            pass""",
}
AFTER = {
    "await": "waiting = asyncio.create_task(a_task(box))",
    "start": "waiting = asyncio.create_task(a_task(box.start()))",
}


def ends_while_it_lives(world: World, actor: Actor) -> None:
    """Everything is gone although the process goes on."""
    actor.until("CANCELLED")
    world.wait_until_clean()
    assert actor.process.poll() is None
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()
    assert actor.wait() == 0


@pytest.mark.faulty  # can hold a request
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("hold", [0.4, 2.0])  # answered before the cancellation reaches it, or after
def test_a_cancelled_wait_ends_what_nobody_holds(world: World, wait: str, hold: float) -> None:
    world.service.fault("create", hold_seconds=hold)
    body = WAITS[wait]
    if hold < 0.7:  # then the wait itself is held up: the loop hears of the answer and of the end together
        body = body.replace("0.7", str(hold))
    ends_while_it_lives(world, world.start_program(PROGRAM.replace("\n        BODY", body)))


@pytest.mark.parametrize("wait", AFTER)
def test_a_cancellation_in_the_instant_after_the_answer(world: World, wait: str) -> None:
    body = f"""
        box = Sandbox(**OPTIONS)
        {AFTER[wait]}
        await asyncio.sleep(0)  # it waits now
        while box.sandbox_id is None or not box._life.is_ready:
            time.sleep(0.01)  # holds the loop up: the answer is there and has reached nobody
        time.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()"""
    ends_while_it_lives(world, world.start_program(PROGRAM.replace("\n        BODY", body)))


@pytest.mark.faulty  # can hold a request
def test_one_of_two_who_wait_gives_up_and_the_other_gets_it(world: World) -> None:
    world.service.fault("create", hold_seconds=1.5)
    body = """
        box = Sandbox.run(**OPTIONS)
        patient = asyncio.create_task(a_task(box))
        try:
            await asyncio.wait_for(box, 0.5)
        except TimeoutError:
            pass
        await patient
        assert (await box.exec(["true"])).returncode == 0
        await box.stop()"""
    ends_while_it_lives(world, world.start_program(PROGRAM.replace("\n        BODY", body)))


def test_a_later_wait_that_is_cancelled_ends_nothing(world: World) -> None:
    body = """
        box = Sandbox(**OPTIONS)
        await box.start()
        waiting = asyncio.create_task(a_task(box))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(0.5)
        say("ALIVE", (await box.exec(["true"])).returncode)
        await box.stop()"""
    actor = world.start_program(PROGRAM.replace("\n        BODY", body))
    assert actor.until("ALIVE") == "ALIVE 0"
    ends_while_it_lives(world, actor)


@pytest.mark.faulty  # counts
def test_a_server_that_times_out_again_and_again_keeps_nothing(world: World) -> None:
    world.service.fault("create", hold_seconds=0.4, times=12)
    body = """
        for _ in range(12):
            try:
                await asyncio.wait_for(Sandbox.run(**OPTIONS), 0.2)
            except TimeoutError:
                pass"""
    began = time.monotonic()
    ends_while_it_lives(world, world.start_program(PROGRAM.replace("\n        BODY", body)))
    assert time.monotonic() - began < 120
