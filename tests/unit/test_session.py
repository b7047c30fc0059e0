"""Sessions on good and bad days: one end for all, retryable, in-flight creates included."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import (
    CleanupError,
    LowtideError,
    Outcome,
    Sandbox,
    SandboxDefaults,
    SandboxError,
    SandboxGone,
    Session,
    SessionClosedError,
    ValidationError,
    results,
)
from lowtide.engine import engine
from lowtide.testing.faulty import FaultyProvider, FaultyService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FaultyService]:
    with FaultyService(tmp_path / "service") as service:
        yield service
        service.clear()
        service.wait_until_empty(seconds=60)


class Stubborn(FaultyProvider):
    """Says no to every destroy, for good, until it is told to give way."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gives_way = False

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        if not self.gives_way:
            raise SandboxError("not now", provider=self.name, sandbox_id=sandbox_id)
        return await super().destroy(sandbox_id, grace_seconds=grace_seconds)


def test_leaving_the_block_ends_every_sandbox(service: FaultyService) -> None:
    with Session(SandboxDefaults(provider="faulty", tags=("job",))) as session:
        first, second = session.sandbox(tags=["one"]), session.sandbox()
        assert first.status is None
        assert results([first.exec(["echo", "1"]), second.exec(["echo", "2"])])[1].stdout == "2\n"
        assert first.tags == ("job", "one")
        assert len(service.sandboxes()) == session.sandbox_count == 2
    assert service.sandboxes() == []
    assert session.sandbox_count == 0
    with pytest.raises(SandboxGone):
        first.exec(["true"]).result(60)


def test_a_closed_session_takes_no_new_work(service: FaultyService) -> None:
    session = Session(provider="faulty")
    unstarted, other = session.sandbox(), Sandbox.run(provider="faulty")
    assert session.close().result(60)[0].outcome is Outcome.ALREADY_GONE
    for work in (
        session.sandbox,
        lambda: session.adopt(other),
        lambda: session.list(adopt=True),
        lambda: session.from_id("x"),
    ):
        with pytest.raises(SessionClosedError):
            work()
    with pytest.raises(LowtideError):
        unstarted.exec(["true"]).result(60)
    assert session.close().result(60) == []
    other.stop().result(60)


def test_closing_ends_a_create_that_is_still_on_its_way(service: FaultyService) -> None:
    service.fault("create", hold_seconds=2.0)
    session = Session(provider="faulty")
    starting = session.sandbox().start()
    time.sleep(0.3)
    session.close().result(120)
    with pytest.raises(LowtideError):
        starting.result(60)
    service.wait_until_empty(seconds=60)


def test_stopping_in_the_instant_after_start_leaves_nothing(service: FaultyService) -> None:
    for _ in range(5):
        sandbox = Sandbox(provider="faulty")
        starting = sandbox.start()
        sandbox.stop().result(120)
        assert starting.exception(60) is None or isinstance(starting.exception(), LowtideError)
        assert service.sandboxes() == []


def test_a_close_that_failed_names_all_failures_and_can_be_tried_again(service: FaultyService) -> None:
    provider = Stubborn(service.directory)
    session = Session(provider=provider)
    boxes = [session.sandbox() for _ in range(3)]
    results([box.start() for box in boxes])
    with pytest.raises(CleanupError) as caught:
        session.close().result(300)
    assert len(caught.value.exceptions) == session.sandbox_count == 3
    provider.gives_way = True
    assert {report.outcome for report in session.close().result(120)} <= {
        Outcome.DESTROYED,
        Outcome.ALREADY_GONE,
    }
    assert session.sandbox_count == 0
    assert service.sandboxes() == []


def test_an_exception_in_the_block_is_never_masked(service: FaultyService) -> None:
    provider = Stubborn(service.directory)
    with pytest.raises(ZeroDivisionError) as caught, Session(provider=provider) as session:
        session.sandbox().start().result(60)
        _ = 1 / 0
    assert any("CleanupError" in note for note in caught.value.__notes__)
    provider.gives_way = True
    session.close().result(120)


def test_a_stop_that_failed_is_raised_at_the_end_of_a_block_and_may_be_tried_again(
    service: FaultyService,
) -> None:
    provider = Stubborn(service.directory)
    with pytest.raises(SandboxError, match="not now"), Sandbox.run(provider=provider) as sandbox:
        pass
    with pytest.raises(KeyError) as caught, sandbox:
        raise KeyError
    assert "not now" in caught.value.__notes__[0]
    provider.gives_way = True
    assert sandbox.stop().result(60).outcome is Outcome.DESTROYED


def test_a_session_works_in_async_code(service: FaultyService) -> None:
    async def main() -> str:
        async with Session(provider="faulty") as session:
            return (await session.sandbox().exec(["echo", "x"])).stdout

    assert asyncio.run(main()) == "x\n"
    assert service.sandboxes() == []


def test_a_cancelled_block_still_ends_its_sandboxes(service: FaultyService) -> None:
    async def main() -> None:
        async with asyncio.timeout(0.5), Session(provider="faulty") as session:
            await session.sandbox()
            await asyncio.sleep(600)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    service.wait_until_empty(seconds=60)


def test_cancelling_while_a_block_is_entered_leaves_nothing(service: FaultyService) -> None:
    service.fault("create", hold_seconds=1.0)

    async def main() -> None:
        async with asyncio.timeout(0.3), Sandbox(provider="faulty"):
            pass

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    service.wait_until_empty(seconds=60)


@contextlib.contextmanager
def busy_engine() -> Iterator[None]:
    """The engine's thread takes nothing up meanwhile, as on a machine where it does not get a processor."""
    busy, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        go_on.wait(60)

    engine().loop.call_soon_threadsafe(hold)
    assert busy.wait(60)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize("how", ["stop", "close", "delete", "block"])
def test_an_end_that_is_cancelled_before_the_engine_takes_it_up_happens(
    service: FaultyService, how: str
) -> None:
    session = Session(provider="faulty")
    box = session.sandbox()
    box.start().result(60)
    assert box.sandbox_id is not None

    async def leave_the_block() -> None:
        async with box:
            pass

    async def main() -> None:
        leaving = asyncio.create_task(leave_the_block())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    with busy_engine():
        if how == "block":
            asyncio.run(main())  # at its end asyncio cancels what is shielded, too
        else:
            ends = {
                "stop": box.stop,
                "close": session.close,
                "delete": lambda: Sandbox.delete(box.sandbox_id or "", provider="faulty"),
            }
            ending = ends[how]()
            assert ending.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                ending.result(60)
    service.wait_until_empty(seconds=60)


def test_adopting_moves_the_end_here_and_releasing_lets_it_live(service: FaultyService) -> None:
    orphan = Sandbox.run(provider="faulty", tags=["orphan"])
    with Session(provider="faulty") as session:
        session.adopt(orphan)
        assert session.sandbox_count == 1
    assert service.sandboxes() == []

    with Session(provider="faulty") as session:
        kept = session.sandbox()
        kept.start().result(60)
        session.release(kept)
        with pytest.raises(ValidationError):
            session.release(kept)
    assert kept.stop().result(60).outcome is Outcome.LEFT
    assert kept.sandbox_id is not None
    assert service.sandboxes() == [kept.sandbox_id]
    Sandbox.delete(kept.sandbox_id, provider="faulty").result(60)
    assert service.sandboxes() == []


def test_a_session_finds_and_adopts_what_another_process_left(service: FaultyService) -> None:
    script = "from lowtide import Sandbox; import os; Sandbox.run(provider='faulty', tags=['left', 'x']); "
    script += "[Sandbox.list(provider='faulty')]; print('made', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "made\n"
    try:
        with Session(provider="faulty", tags=["left"]) as session:
            assert session.list(tags=["x"], adopt=True).result(60) == []  # its owner lives
            (found,) = session.list(tags=["x"], adopt=True, take=True).result(60)
            assert found.owner is not None
            assert found.owner.pid == os.getpid()
            assert found.exec(["echo", "hi"]).result(60).stdout == "hi\n"
            assert set(found.tags) == {"left", "x"}
        assert service.sandboxes() == []
    finally:
        other.communicate("\n", timeout=120)


def test_concurrent_stops_from_many_threads_share_one_end(service: FaultyService) -> None:
    sandbox = Sandbox.run(provider="faulty")
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(sandbox.stop().result(60).outcome)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 8
    assert set(outcomes) <= {Outcome.DESTROYED, Outcome.ALREADY_GONE}
    assert Outcome.DESTROYED in outcomes


def test_an_unstarted_sandbox_cannot_be_adopted(service: FaultyService) -> None:
    with Session(provider="faulty") as session, pytest.raises(ValidationError):
        session.adopt(Sandbox(provider="faulty"))
