"""Conformance of cancellation: a cancelled create leaves nothing, a cancelled command leaves no process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from lowtide import Sandbox, Session
from lowtide.engine import engine
from lowtide.lifecycle.leases import lifecycle
from lowtide.providers.base import Provider
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    commands_inside,
    create_keywords,
    duration_token,
    eventually,
    sh,
)
from lowtide.testing.conformance.lifecycle import is_gone


class CancellationConformance(Conformance):
    @pytest.mark.parametrize("after_seconds", [0.0, 0.001, 0.005, 0.02, 0.1, 0.5])
    def test_a_cancelled_create_leaves_no_sandbox(
        self, after_seconds: float, provider_under_test: ProviderUnderTest, tag: str
    ) -> None:
        async def life() -> None:
            async def use() -> None:
                async with Sandbox.run(**create_keywords(provider_under_test, tags=[tag])) as box:
                    await box.exec(["sleep", "1000"])

            task = asyncio.create_task(use())
            await asyncio.sleep(after_seconds)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(life())
        eventually(lambda: _none_left(provider_under_test, tag), what="the end of a cancelled create")

    def test_a_cancelled_start_of_a_bare_sandbox_leaves_no_sandbox(
        self, provider_under_test: ProviderUnderTest, tag: str
    ) -> None:
        box = Sandbox(**create_keywords(provider_under_test, tags=[tag]))
        box.start().cancel()
        box.stop().result(ANSWER_SECONDS)
        eventually(lambda: _none_left(provider_under_test, tag), what="the end of a cancelled start")

    def test_an_asyncio_timeout_over_many_creates(
        self, provider_under_test: ProviderUnderTest, tag: str
    ) -> None:
        async def life() -> None:
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(0.02),
                    Session(create_keywords(provider_under_test, tags=(tag,))) as session,
                ):
                    boxes = [session.sandbox() for _ in range(6)]
                    await asyncio.gather(*(box.exec(["sleep", "1000"]) for box in boxes))

        asyncio.run(life())
        eventually(lambda: _none_left(provider_under_test, tag), what="the end of all cancelled creates")

    def test_a_cancelled_command_ends_with_its_whole_tree(self, box: Sandbox) -> None:
        token = duration_token()

        async def life() -> None:
            process = box.exec(["sh", "-c", f"(setsid sleep {token} &); echo up; sleep {token}"])
            async for _ in process.stdout:
                break
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(process, 0.05)

        asyncio.run(life())
        eventually(lambda: token not in commands_inside(box), what="the end of the cancelled tree")
        assert sh(box, "echo usable") == "usable\n"

    def test_cancelling_one_command_leaves_the_others(self, box: Sandbox) -> None:
        async def life() -> str:
            lasting = box.exec(["sh", "-c", "echo up; cat"], stdin=True)
            async for _ in lasting.stdout:
                break
            other = asyncio.ensure_future(box.exec(["sleep", "1000"]))
            await asyncio.sleep(0.1)
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            assert lasting.stdin is not None
            await lasting.stdin.write(b"still here\n")
            await lasting.stdin.close()
            return (await lasting).stdout

        assert asyncio.run(life()) == "up\nstill here\n"

    def test_a_block_that_is_cancelled_ends_its_sandbox(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        ids: list[str] = []

        async def life() -> None:
            async def use() -> None:
                async with Sandbox.run(**create_keywords(provider_under_test)) as box:
                    await box.exec(["true"])
                    assert box.sandbox_id is not None
                    ids.append(box.sandbox_id)
                    await asyncio.sleep(1000)

            task = asyncio.create_task(use())
            while not ids:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(life())
        assert is_gone(provider, ids[0])

    def test_a_stop_whose_waiter_is_cancelled_happens_all_the_same(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        async def life() -> str:
            box = Sandbox.run(**create_keywords(provider_under_test))
            await box.exec(["true"])
            stopping = asyncio.ensure_future(_wait_for_stop(box))
            await asyncio.sleep(0)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            assert box.sandbox_id is not None
            return box.sandbox_id

        sandbox_id = asyncio.run(life())
        eventually(lambda: is_gone(provider, sandbox_id), what="the end")

    def test_a_cancelled_transfer_leaves_no_half_file(self, box: Sandbox, place: str) -> None:
        async def life() -> None:
            async def endless() -> AsyncIterator[bytes]:
                while True:
                    yield b"x" * 100_000
                    await asyncio.sleep(0.001)

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.write_file_streaming(f"{place}/half", endless()), 0.3)

        asyncio.run(life())
        eventually(
            lambda: list(box.list_dir(place).result(ANSWER_SECONDS)) == [], what="the end of the half file"
        )


async def _wait_for_stop(box: Sandbox) -> None:
    await box.stop()


def _none_left(under_test: ProviderUnderTest, tag: str) -> bool:
    """Neither there nor still to come: what a request that is under way makes is ended after its answer."""
    rows = engine().run(lifecycle().ledger.leases(), ANSWER_SECONDS)
    return not any(tag in row.tags for row in rows) and not Sandbox.list(
        tags=[tag], provider=under_test.name
    ).result(ANSWER_SECONDS)
