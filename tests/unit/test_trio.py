"""A trio program: the same sandboxes, awaited, streamed, cancelled and ended as under asyncio."""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncIterator

import pytest
import trio

from lowtide import Sandbox, SandboxGone, Session, ValidationError, loops
from lowtide.lifecycle.lease import Outcome
from lowtide.providers.base import SandboxState
from lowtide.sandbox import in_event_loop


def test_a_block_runs_commands_and_ends_its_sandbox() -> None:
    async def main() -> Sandbox:
        async with Sandbox.run() as sandbox:
            await sandbox.write_file("note", b"hello")
            assert (await sandbox.exec(["cat", "note"])).stdout == "hello"
        return sandbox

    with pytest.raises(SandboxGone):
        trio.run(main).exec(["true"]).result()


def test_run_does_not_block_the_loop() -> None:
    async def main() -> None:
        assert in_event_loop()  # what `run` decides by
        sandbox = await Sandbox.run()
        assert (await sandbox.stop()).outcome is Outcome.DESTROYED

    trio.run(main)


def test_output_is_streamed_while_other_tasks_run() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def tick() -> None:
            while True:
                await trio.sleep(0.01)
                seen.append(".")

        async with Sandbox.run() as sandbox, trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            process = sandbox.exec(["sh", "-c", "echo one; sleep 0.3; echo two"])
            async for chunk in process.stdout:
                seen.append(chunk)
            await process
            nursery.cancel_scope.cancel()
        return seen

    seen = trio.run(main)
    words = "".join(seen)
    assert words.replace(".", "") == "one\ntwo\n"
    assert "." in words[words.index("one") : words.index("two")]


def test_a_cancelled_wait_ends_the_command() -> None:
    async def main() -> None:
        async with Sandbox.run() as sandbox:
            process = sandbox.exec(["sleep", "600"])
            with trio.move_on_after(0.5) as scope:
                await process
            assert scope.cancelled_caught
            assert process.done()
            await sandbox.exec(["sh", "-c", "while pidof sleep; do :; done"], timeout_seconds=30)

    trio.run(main)


def test_a_cancelled_block_still_ends_its_sandbox() -> None:
    async def main() -> Sandbox:
        with trio.CancelScope() as scope:
            async with Sandbox.run() as sandbox:
                scope.cancel()
                await trio.sleep_forever()
        return sandbox

    assert trio.run(main).get_status() is SandboxState.GONE


def test_a_session_closes() -> None:
    async def main() -> None:
        async with Session() as session:
            first = session.sandbox()
            await first.exec(["true"])
        assert await first.refresh() is SandboxState.GONE

    trio.run(main)


def test_an_async_iterable_of_trio_is_refused_with_the_way_out() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x"

    async def main() -> None:
        async with Sandbox.run() as sandbox:
            with pytest.raises(ValidationError, match="pass bytes or an iterable"):
                sandbox.write_file_streaming("note", chunks())

    trio.run(main)


def test_a_module_of_that_name_that_is_not_trio_or_only_half_of_it_harms_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "trio.lowlevel", raising=False)
    monkeypatch.setitem(sys.modules, "trio", types.ModuleType("trio"))
    assert not loops.in_trio()
    monkeypatch.setitem(sys.modules, "trio.lowlevel", types.ModuleType("trio.lowlevel"))
    assert not loops.in_trio()
