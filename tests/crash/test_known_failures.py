"""What is known to leak or hang in other libraries, case by case. None of it may happen here.

The first part are fourteen scenarios in which a sandbox client leaked or hung; the second part is what
an agent platform's runtimes never tested.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox, Session, results
from lowtide.errors import CleanupError, SandboxGone, SandboxNotFoundError, SandboxUnavailableError
from lowtide.lifecycle.lease import Outcome
from lowtide.testing.faulty import FaultyService
from tests.crash.world import World


def test_a_bare_sandbox_at_normal_exit(world: World) -> None:
    actor = world.start("normal_exit", 2)
    assert actor.wait() == 0
    world.wait_until_clean()


def test_a_session_that_was_dropped_and_collected(world: World) -> None:
    actor = world.start("session_dropped", 2)
    assert actor.wait() == 0
    actor.drain()
    assert len(actor.made()) == 2
    world.wait_until_clean()


def test_closing_a_session_while_a_start_is_on_its_way(world: World) -> None:
    if world.provider_name == "faulty":
        world.service.fault("create", hold_seconds=0.5, times=3)
    actor = world.start("start_then_close", 3)
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.faulty  # can hold a request
@pytest.mark.parametrize("scenario", ["hold", "with_block", "in_session", "in_asyncio"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_create_is_in_flight(world: World, scenario: str, number: signal.Signals) -> None:
    world.service.fault("create", hold_seconds=1.0, times=3)
    actor = world.start(scenario, 1)
    while not world.existing():
        assert actor.process.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    actor.process.send_signal(number)
    assert actor.wait(40) == -number
    world.wait_until_clean()


def test_a_fork_through_multiprocessing(world: World) -> None:
    actor = world.start("multiprocessing_child", 2)
    assert actor.until("CHILD") == "CHILD 0 True"
    assert actor.wait() == 0
    world.wait_until_clean()


def test_what_was_only_attached_lives_on(world: World) -> None:
    holder = world.start("hold", 1)
    holder.until("READY")
    (sandbox_id,) = holder.made()
    visitor = world.start("attached", 0, ACTOR_SANDBOX=sandbox_id)
    assert visitor.wait() == 0
    assert world.existing() == {sandbox_id}
    holder.kill()
    world.wait_until_clean()


# In this process, through the public surface.


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FaultyService]:
    with FaultyService(tmp_path / "service") as service:
        yield service
        service.clear()
        service.wait_until_empty(30)


def run(**options: object) -> Sandbox:
    return Sandbox.run(provider="faulty", **options)  # type: ignore[arg-type]


def test_a_close_that_failed_can_be_repeated(service: FaultyService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_END_SECONDS", "1")
    session = Session({"provider": "faulty"})
    boxes = [session.sandbox() for _ in range(3)]
    results([box.start() for box in boxes])
    service.fault("destroy", stuck=True, times=400)
    with pytest.raises(CleanupError) as caught:
        session.close().result()
    assert len(caught.value.exceptions) == 3
    assert len(service.sandboxes()) == 3
    service.clear()
    reports = session.close().result()
    assert {report.outcome for report in reports} == {Outcome.DESTROYED}
    assert service.sandboxes() == []


def test_a_stop_has_time_for_its_grace(service: FaultyService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_END_SECONDS", "1")
    box = run()
    service.fault("destroy", hold_seconds=2.0)  # the sandbox takes its time, as it may
    assert box.stop(graceful_shutdown_seconds=60.0).result().outcome is Outcome.DESTROYED


def test_stop_twice_from_two_threads_and_after_it_is_gone(service: FaultyService) -> None:
    box = run()
    service.fault("destroy", hold_seconds=1.0)  # so that the second surely comes while the first is at it
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(box.stop().result().outcome)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [Outcome.DESTROYED, Outcome.DESTROYED]  # one ending, shared
    assert box.stop().result().outcome in (Outcome.DESTROYED, Outcome.ALREADY_GONE)


def test_stop_after_the_provider_deleted_it_is_silent(service: FaultyService) -> None:
    box = run()
    service.move_clock(86_400)
    assert box.stop().result().outcome is Outcome.ALREADY_GONE


def test_an_exception_in_the_block_is_not_masked_by_a_failing_end(service: FaultyService) -> None:
    with pytest.raises(ZeroDivisionError), run() as box:
        service.fault("destroy", rate_limit=0.1)
        raise ZeroDivisionError
    assert box.sandbox_id not in service.sandboxes()


def test_attaching_to_what_does_not_exist_makes_nothing(service: FaultyService) -> None:
    with pytest.raises(SandboxNotFoundError):
        Sandbox.from_id("nowhere", provider="faulty").result()
    assert service.sandboxes() == []


def test_use_after_stop_says_so(service: FaultyService) -> None:
    box = run()
    box.stop().result()
    with pytest.raises(SandboxGone):
        box.exec(["true"]).result()


def test_a_service_that_is_down_at_create_leaves_nothing(service: FaultyService) -> None:
    service.fault("create", lose_answer=True)
    service.fault("find", fail=True)
    with pytest.raises(SandboxUnavailableError):
        run()
    service.wait_until_empty(20)


def test_many_end_in_parallel(service: FaultyService) -> None:
    boxes = [Sandbox(provider="faulty") for _ in range(30)]
    results([box.start() for box in boxes])
    service.fault("destroy", hold_seconds=0.5, times=30)
    started = time.monotonic()
    results([box.stop() for box in boxes])
    assert time.monotonic() - started < 15 * 0.5  # one after the other is twice that


def test_a_sandbox_of_another_owner_with_a_similar_name_is_untouched(service: FaultyService) -> None:
    box = run(tags=["job"])
    twin = service.make_foreign(f"{box.sandbox_id}-2")
    box.stop().result()
    assert service.sandboxes() == [twin]
    Sandbox.delete(twin, provider="faulty").result()


def test_no_secret_of_the_sandbox_reaches_the_ledger(service: FaultyService) -> None:
    import os

    box = run(environment_variables={"TOKEN": "hunter2-in-the-sandbox"})
    for path in Path(os.environ["LOWTIDE_HOME"]).glob("ledger.db*"):
        assert b"hunter2-in-the-sandbox" not in path.read_bytes()
    box.stop().result()
