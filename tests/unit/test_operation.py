"""Operations: waited for from threads and loops, cancelled, collected, and never hung on after a fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading

import pytest

from lowtide import Operation, SandboxTimeoutError, ValidationError, results, wait
from lowtide.engine import engine
from lowtide.errors import SandboxError


async def after(seconds: float, value: int = 1) -> int:
    await asyncio.sleep(seconds)
    return value


async def failing(message: str) -> int:
    raise SandboxError(message)


def test_a_result_is_the_same_in_threads_and_in_several_loops_at_once() -> None:
    operation = Operation.start(after(0.1, 7))
    seen: list[int] = []

    def in_a_loop() -> None:
        async def main() -> int:
            return await operation

        seen.append(asyncio.run(main()))

    threads = [threading.Thread(target=in_a_loop) for _ in range(2)]
    threads += [threading.Thread(target=lambda: seen.append(operation.result())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [7] * 4
    assert operation.done()
    assert operation.exception() is None


def test_a_wait_that_is_too_short_leaves_the_operation_running() -> None:
    operation = Operation.start(after(0.5, 3))
    with pytest.raises(SandboxTimeoutError):
        operation.result(timeout=0.01)
    assert operation.result(timeout=60) == 3


def test_a_timeout_raised_by_the_operation_itself_is_told_apart() -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own") as caught:
        Operation.start(late()).result(timeout=60)
    assert not isinstance(caught.value, SandboxTimeoutError)


def test_cancelling_the_awaiting_task_cancels_the_operation() -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Operation.start(work()), 0.2)

    asyncio.run(main())
    assert cancelled.wait(60)


def test_cancel_makes_result_raise() -> None:
    operation = Operation.start(after(600))
    assert operation.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        operation.result(timeout=60)


def test_results_collects_all_before_it_raises_the_first_failure_with_the_others_noted() -> None:
    slow = Operation.start(after(0.3))
    operations = [Operation.start(failing("first")), slow, Operation.start(failing("second"))]
    with pytest.raises(SandboxError, match="first") as caught:
        results(operations)
    assert slow.done()
    assert caught.value.__notes__ == ["also failed: SandboxError: second"]


def test_results_keeps_the_order_and_takes_a_single_one() -> None:
    assert results([Operation.start(after(0.2, 1)), Operation.start(after(0.0, 2))]) == [1, 2]
    assert results(Operation.start(after(0.0, 5))) == 5
    assert results([]) == []
    with pytest.raises(ValidationError):
        results([1])  # type: ignore[list-item]


def test_wait_returns_as_soon_as_enough_are_done() -> None:
    quick, slow = Operation.start(after(0.0)), Operation.start(after(600))
    try:
        assert wait([slow, quick], num_returns=1, timeout=60) == ([quick], [slow])
        assert wait([slow, quick], timeout=0.1) == ([quick], [slow])
        assert wait([Operation.start(failing("x"))], timeout=60)[1] == []
        with pytest.raises(ValidationError):
            wait([quick], num_returns=2)
    finally:
        slow.cancel()


def test_blocking_on_the_engines_own_thread_is_refused_and_not_a_deadlock() -> None:
    async def on_the_engine() -> None:
        Operation.start(after(1)).result()

    with pytest.raises(RuntimeError, match="await it instead"):
        engine().run(on_the_engine(), timeout=60)


def test_a_forked_child_fails_clearly_on_its_parents_operation() -> None:
    operation = Operation.start(after(600))
    try:
        pid = os.fork()
        if pid == 0:
            try:
                operation.result()
            except SandboxError:
                # and can start its own
                os._exit(0 if Operation.start(after(0.0, 4)).result(60) == 4 else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        operation.cancel()


def test_control_c_interrupts_a_wait_in_the_main_thread() -> None:
    script = """
import asyncio, os, signal, threading
from lowtide import Operation
operation = Operation.start(asyncio.sleep(600))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    operation.result()
except KeyboardInterrupt:
    print("interrupted")
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert shown.stdout == "interrupted\n"
