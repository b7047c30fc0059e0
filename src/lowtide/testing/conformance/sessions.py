"""Conformance of sessions: shared defaults, one end, and what passes from one owner to another."""

from __future__ import annotations

import asyncio
import os

import pytest

from lowtide import Sandbox, SandboxDefaults, Session
from lowtide.errors import SandboxOwnedError, SessionClosedError
from lowtide.lifecycle.lease import Outcome
from lowtide.providers.base import Provider
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    create_keywords,
    eventually,
    sh,
)
from lowtide.testing.conformance.lifecycle import is_gone, other_process


class SessionConformance(Conformance):
    def test_the_end_of_a_session_is_the_end_of_its_sandboxes(
        self, provider_under_test: ProviderUnderTest, provider: Provider, tag: str
    ) -> None:
        with Session(SandboxDefaults(**create_keywords(provider_under_test, tags=(tag,)))) as session:
            boxes = [session.sandbox(), session.sandbox(environment_variables={"N": "2"})]
            assert [sh(box, "echo ${N:-1}") for box in boxes] == ["1\n", "2\n"]
            assert session.sandbox_count == 2
            listed = session.list(tags=[tag]).result(ANSWER_SECONDS)
            assert {box.sandbox_id for box in listed} == {box.sandbox_id for box in boxes}
        assert all(is_gone(provider, box.sandbox_id) for box in boxes)

    def test_an_async_session(self, provider_under_test: ProviderUnderTest, provider: Provider) -> None:
        async def life() -> list[str | None]:
            async with Session(create_keywords(provider_under_test)) as session:
                boxes = [session.sandbox() for _ in range(3)]
                outputs = await asyncio.gather(*(box.exec(["echo", str(n)]) for n, box in enumerate(boxes)))
                assert [output.stdout for output in outputs] == ["0\n", "1\n", "2\n"]
                return [box.sandbox_id for box in boxes]

        assert all(is_gone(provider, sandbox_id) for sandbox_id in asyncio.run(life()))

    def test_close_answers_for_each_and_can_be_called_again(
        self, provider_under_test: ProviderUnderTest
    ) -> None:
        session = Session(create_keywords(provider_under_test))
        ids = {session.sandbox().wait(ANSWER_SECONDS).sandbox_id for _ in range(3)}
        reports = session.close().result(ANSWER_SECONDS)
        assert {report.sandbox_id for report in reports} == ids
        assert {report.outcome for report in reports} == {Outcome.DESTROYED}
        session.close().result(ANSWER_SECONDS)

    def test_close_ends_a_create_that_is_still_in_flight(
        self, provider_under_test: ProviderUnderTest, tag: str
    ) -> None:
        session = Session(create_keywords(provider_under_test, tags=(tag,)))
        starting = [session.sandbox().start() for _ in range(3)]
        session.close().result(ANSWER_SECONDS)
        for operation in starting:
            operation.exception(ANSWER_SECONDS)

        def none_left() -> bool:
            return not Sandbox.list(tags=[tag], provider=provider_under_test.name).result(ANSWER_SECONDS)

        eventually(none_left, what="the end of a create in flight")

    def test_a_closed_session_takes_no_new_work(self, provider_under_test: ProviderUnderTest) -> None:
        session = Session(create_keywords(provider_under_test))
        session.close().result(ANSWER_SECONDS)
        with pytest.raises(SessionClosedError):
            session.sandbox()

    def test_one_that_was_stopped_before_is_no_trouble_at_close(
        self, provider_under_test: ProviderUnderTest
    ) -> None:
        with Session(create_keywords(provider_under_test)) as session:
            box = session.sandbox()
            box.wait(ANSWER_SECONDS)
            box.stop().result(ANSWER_SECONDS)

    def test_an_exception_in_the_block_is_not_masked(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        with pytest.raises(ZeroDivisionError), Session(create_keywords(provider_under_test)) as session:
            box = session.sandbox().wait(ANSWER_SECONDS)
            _ = 1 // 0
        assert is_gone(provider, box.sandbox_id)

    def test_adopt_takes_over_what_another_process_made(
        self, provider_under_test: ProviderUnderTest, provider: Provider, tag: str
    ) -> None:
        with other_process(provider_under_test, tag) as sandbox_id:
            session = Session(create_keywords(provider_under_test))
            found = Sandbox.list(tags=[tag], provider=provider_under_test.name).result(ANSWER_SECONDS)
            for box in found:
                with pytest.raises(SandboxOwnedError):  # its maker lives
                    session.adopt(box)
                session.adopt(box, take=True)
            assert session.sandbox_count == 1
        # Its maker has left, and it is not the maker's to end any more.
        assert not is_gone(provider, sandbox_id)
        assert sh(found[0], "echo still here") == "still here\n"
        assert [report.outcome for report in session.close().result(ANSWER_SECONDS)] == [Outcome.DESTROYED]
        assert is_gone(provider, sandbox_id)

    def test_from_id_adopts_unless_told_otherwise(
        self, provider_under_test: ProviderUnderTest, provider: Provider, tag: str
    ) -> None:
        with other_process(provider_under_test, tag) as sandbox_id:
            with Session(create_keywords(provider_under_test)) as session:
                session.from_id(sandbox_id, adopt=False).result(ANSWER_SECONDS)
            assert not is_gone(provider, sandbox_id)
            with Session(create_keywords(provider_under_test)) as session:
                session.from_id(sandbox_id, take=True).result(ANSWER_SECONDS)
            assert is_gone(provider, sandbox_id)

    def test_list_with_adopt(
        self, provider_under_test: ProviderUnderTest, provider: Provider, tag: str
    ) -> None:
        with other_process(provider_under_test, tag) as sandbox_id:
            with Session(create_keywords(provider_under_test)) as session:
                assert session.list(tags=[tag], adopt=True).result(ANSWER_SECONDS) == []  # its maker lives
                session.list(tags=[tag], adopt=True, take=True).result(ANSWER_SECONDS)
            assert is_gone(provider, sandbox_id)

    def test_a_released_sandbox_outlives_its_session(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        with Session(create_keywords(provider_under_test)) as session:
            box = session.sandbox().wait(ANSWER_SECONDS)
            session.release(box)
        try:
            assert box.stop().result(ANSWER_SECONDS).outcome is Outcome.LEFT
            assert not is_gone(provider, box.sandbox_id)
        finally:
            assert box.sandbox_id is not None
            Sandbox.delete(box.sandbox_id, provider=provider.name, missing_ok=True).result(ANSWER_SECONDS)
        assert is_gone(provider, box.sandbox_id)

    def test_a_function_runs_in_a_sandbox_of_its_own(self, session: Session) -> None:
        offset = 40

        @session.function()
        def add(x: int, y: int = 1) -> dict[str, int]:
            return {"sum": x + y + offset, "pid": os.getpid()}

        probe = session.sandbox()
        if probe.exec(["sh", "-c", "command -v python3"]).result(ANSWER_SECONDS).returncode != 0:
            pytest.skip("no Python in this sandbox to run it with")
        assert add.local(1)["pid"] == os.getpid()
        found = [one.result(ANSWER_SECONDS)["sum"] for one in (add.remote(1), *add.map([(1, 2), (3, 4)]))]
        assert found == [42, 43, 47]
        assert session.sandbox_count == 1
