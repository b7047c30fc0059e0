"""Conformance of use from everywhere at once: threads, event loops, forked children."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowtide import Sandbox, Session
from lowtide.lifecycle.lease import Outcome
from lowtide.providers.base import Provider
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    create_keywords,
    sh,
)
from lowtide.testing.conformance.lifecycle import is_gone


class ConcurrencyConformance(Conformance):
    def test_threads_and_two_event_loops_at_once(self, provider_under_test: ProviderUnderTest) -> None:
        def in_a_thread(n: int) -> str:
            with Sandbox.run(**create_keywords(provider_under_test)) as box:
                box.write_file("/tmp/n", str(n)).result(ANSWER_SECONDS)
                return sh(box, "cat /tmp/n")

        async def in_a_loop(n: int) -> str:
            async def one(k: int) -> str:
                async with Sandbox.run(**create_keywords(provider_under_test)) as box:
                    await box.write_file("/tmp/n", f"{n}.{k}")
                    return (await box.exec(["cat", "/tmp/n"])).stdout

            return ",".join(await asyncio.gather(one(0), one(1)))

        count = provider_under_test.parallel
        with ThreadPoolExecutor(count + 2) as threads:
            sync = [threads.submit(in_a_thread, n) for n in range(count)]
            loops = [threads.submit(asyncio.run, in_a_loop(n)) for n in range(2)]
            assert [future.result(ANSWER_SECONDS) for future in sync] == [str(n) for n in range(count)]
            assert [future.result(ANSWER_SECONDS) for future in loops] == ["0.0,0.1", "1.0,1.1"]

    def test_one_sandbox_used_by_threads_and_two_loops_at_once(self, box: Sandbox) -> None:
        async def in_a_loop(n: int) -> list[str]:
            answers = await asyncio.gather(*(box.exec(["echo", f"loop {n} {k}"]) for k in range(5)))
            return [answer.stdout for answer in answers]

        with ThreadPoolExecutor(14) as threads:
            sync = [threads.submit(sh, box, f"echo thread {n}") for n in range(12)]
            loops = [threads.submit(asyncio.run, in_a_loop(n)) for n in range(2)]
            assert [future.result(ANSWER_SECONDS) for future in sync] == [f"thread {n}\n" for n in range(12)]
            for n, future in enumerate(loops):
                assert future.result(ANSWER_SECONDS) == [f"loop {n} {k}\n" for k in range(5)]

    def test_a_sandbox_made_in_one_loop_is_used_in_another(
        self, provider_under_test: ProviderUnderTest
    ) -> None:
        async def make() -> Sandbox:
            box = Sandbox.run(**create_keywords(provider_under_test))
            await box.exec(["true"])
            return box

        async def use(box: Sandbox) -> str:
            async with box:
                return (await box.exec(["echo", "second loop"])).stdout

        assert asyncio.run(use(asyncio.run(make()))) == "second loop\n"

    def test_a_process_is_read_by_one_thread_and_fed_by_another(self, box: Sandbox) -> None:
        process = box.exec(["cat"], stdin=True)
        assert process.stdin is not None
        writer = process.stdin

        def feed() -> None:
            for n in range(50):
                writer.write(f"{n}\n".encode()).result(ANSWER_SECONDS)
            writer.close().result(ANSWER_SECONDS)

        thread = threading.Thread(target=feed)
        thread.start()
        text = "".join(process.stdout)
        thread.join(ANSWER_SECONDS)
        assert text == "".join(f"{n}\n" for n in range(50))

    def test_a_session_shared_by_threads(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        count = min(provider_under_test.parallel, 8)
        with Session(create_keywords(provider_under_test)) as session, ThreadPoolExecutor(count) as threads:
            boxes = list(threads.map(lambda _: session.sandbox().wait(ANSWER_SECONDS), range(count)))
            assert session.sandbox_count == count
        assert all(is_gone(provider, box.sandbox_id) for box in boxes)

    @pytest.mark.slow
    def test_a_crowd_is_started_used_and_stopped_at_once(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        async def life() -> list[str]:
            async with Session(create_keywords(provider_under_test)) as session:
                boxes = [session.sandbox() for _ in range(provider_under_test.crowd)]
                answers = await asyncio.gather(*(box.exec(["echo", str(n)]) for n, box in enumerate(boxes)))
                assert [answer.stdout for answer in answers] == [f"{n}\n" for n in range(len(boxes))]
                reports = await asyncio.gather(*(box.stop(graceful_shutdown_seconds=0.0) for box in boxes))
                assert {report.outcome for report in reports} == {Outcome.DESTROYED}
                return [str(box.sandbox_id) for box in boxes]

        for _ in range(2):
            ids = asyncio.run(life())
            assert len(set(ids)) == provider_under_test.crowd
            assert all(is_gone(provider, sandbox_id) for sandbox_id in ids)

    def test_a_forked_child_neither_hangs_nor_ends_its_parents_sandboxes(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        box = make_sandbox()
        with make_sandbox() as other:
            sh(other, "true")

            def child() -> None:
                # What a child does by accident: leaves a with block, lets handles go, runs exit hooks.
                other.__exit__(None, None, None)

            _in_forked_child(child, allow_errors=True)
            assert sh(box, "echo alive") == "alive\n"
        assert not is_gone(provider, box.sandbox_id)

    def test_a_forked_child_makes_and_ends_its_own(
        self, make_sandbox: Callable[..., Sandbox], provider_under_test: ProviderUnderTest
    ) -> None:
        box = make_sandbox()

        def child() -> None:
            with Sandbox.run(**create_keywords(provider_under_test)) as own:
                assert sh(own, "echo child") == "child\n"

        _in_forked_child(child)
        assert sh(box, "echo parent") == "parent\n"

    def test_a_forked_childs_exit_hooks_touch_nothing(self, make_sandbox: Callable[..., Sandbox]) -> None:
        box = make_sandbox()
        _in_forked_child(lambda: None, hooks=True)
        assert sh(box, "echo parent") == "parent\n"


def _in_forked_child(work: Callable[[], None], *, allow_errors: bool = False, hooks: bool = False) -> None:
    """Run `work` in a forked child and wait for it; a child that hangs is killed and fails the test."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            if allow_errors:
                code = 0
            else:
                os.write(2, f"forked child: {error!r}\n".encode())
        if hooks:
            import atexit

            atexit._run_exitfuncs()
        os._exit(code)
    deadline = time.monotonic() + ANSWER_SECONDS / 2
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the forked child hung")
